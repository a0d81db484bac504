"""Whatever comes over a network, its readers refuse it as they say that they do."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.faults.fuzz import READERS, read_one, run


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_malformed_input_breaks_no_reader(seed: int) -> None:
    read_one(seed)


def test_inputs_reach_every_reader_to_its_end() -> None:
    """Or the readers would not be tested but their first line."""
    found = run(1800, seed=1)
    outcomes = {reader.__name__: set[str]() for reader in READERS}
    for reader, outcome in found:
        outcomes[reader].add(outcome)
    for reader in ("to_listener", "to_dialer"):
        assert outcomes[reader] >= {"accepted", "Refused", "Malformed"}
    assert outcomes["to_connection"] == {"accepted", "PeerLost"}
    assert outcomes["to_list"] == {"accepted", "left rows out"}
    for reader in ("to_beat", "to_ledger", "to_address", "to_position"):
        assert outcomes[reader] == {"accepted", "refused"}
    assert outcomes["to_chunk"] == {"Damaged", "judged by parts"}
