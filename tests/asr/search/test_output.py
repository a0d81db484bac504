"""Words as files of other programs."""

import json

from lightning_adpsgd.asr.search.output import ctm_line, ctm_name, json_line, text_grid
from lightning_adpsgd.asr.search.words import TimedWord

SAID = [TimedWord("yes", 0.5, 0.25, 0.98765), TimedWord('"no"', 1.0, 0.5, 0.5)]


def test_a_word_is_a_line_of_ctm():
    assert ctm_line("sw_4390", "A", SAID[0]) == "sw_4390 A 0.50 0.25 yes 0.988"


def test_blanks_in_the_name_of_a_file_part_no_fields_of_ctm():
    line = ctm_line("my\tcall  2", "A", SAID[0])
    assert line == "my_call_2 A 0.50 0.25 yes 0.988"
    assert ctm_name(" ") == "_"


def test_an_utterance_is_an_object():
    told = json.loads(json_line("sw_4390-A", SAID))
    assert told["name"] == "sw_4390-A"
    assert told["words"][0] == {
        "word": "yes",
        "start_s": 0.5,
        "duration_s": 0.25,
        "confidence": 0.9877,
    }


def intervals(text: str, tier: int) -> list[tuple[float, float, str]]:
    part = text.split("    item [")[tier].split("intervals [")[1:]
    fields = [
        [line.split(" = ", 1)[1] for line in one.splitlines()[1:4]] for one in part
    ]
    return [(float(begin), float(end), said) for begin, end, said in fields]


def test_words_and_gaps_fill_a_tier():
    text = text_grid({"A": SAID[::-1], "B": []}, 2.0)
    assert text.count('class = "IntervalTier"') == 4
    assert intervals(text, 1) == [
        (0.0, 0.5, '""'),
        (0.5, 0.75, '"yes"'),
        (0.75, 1.0, '""'),
        (1.0, 1.5, '"""no"""'),
        (1.5, 2.0, '""'),
    ]
    assert intervals(text, 2)[1] == (0.5, 0.75, '"0.988"')
    assert intervals(text, 4) == [(0.0, 2.0, '""')]


def test_words_that_overlap_or_reach_beyond_the_end_stay_in_order():
    words = [TimedWord("a", 0.0, 1.0), TimedWord("b", 0.8, 0.7), TimedWord("c", 1.4, 1)]
    found = intervals(text_grid({"A": words}, 2.0), 1)
    assert found == [(0.0, 1.0, '"a"'), (1.0, 1.5, '"b"'), (1.5, 2.4, '"c"')]
