"""The sweep over acoustic scales goes on where the best one is at an end."""

import pytest

from recipes.hybrid.recognition.recognise import beyond_the_best


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({0.1: 0.3, 0.2: 0.2, 0.4: 0.25}, None),
        ({0.1: 0.3, 0.2: 0.2}, 0.4),
        ({0.1: 0.2, 0.2: 0.3}, 0.05),
        ({0.3: 0.1, 0.2: 0.2, 0.1: 0.3}, 0.45),
        ({0.1: 0.2}, None),
        ({0.1: 0.2, 0.2: 0.2, 0.4: 0.2}, None),
    ],
)
def test_the_next_scale_is_beyond_the_best(rates, expected):
    assert beyond_the_best(rates) == expected
