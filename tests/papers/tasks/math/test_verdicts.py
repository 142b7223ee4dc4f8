r"""What each box earns: verdicts.txt and the table of docs/tasks/math.md, through the three rewards.

A block of verdicts.txt begins with `# training evaluation`, each 1, 0 or none (no verdict, which earns what a wrong
answer earns). A line is `right answer @ box @ box …`.

spelling.yaml has plain numbers, and texts that may be compared or not.

Not covered: how a box is found in a response (test_reward.py).
"""

import itertools
import re
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from verl_clipx.papers.tasks.math import comparison, equality, spelling
from verl_clipx.papers.tasks.math.comparison import MAX_DEPTH, MAX_LENGTH, is_safe_to_parse
from verl_clipx.papers.tasks.math.equality import equal_answers, is_equivalent
from verl_clipx.papers.tasks.math.reward import compute_score, compute_score_for_evaluation, compute_score_strict
from verl_clipx.papers.tasks.math.spelling import MAX_NUMBER_LENGTH, SPELLINGS, parse_number

PAGE = Path(__file__).parents[4] / "docs" / "tasks" / "math.md"
COLUMNS = ["right answer", "box", "training", "evaluation", "why"]

# The score and whether there is no verdict.
OUTCOMES = {"1": (1.0, 0.0), "0": (0.0, 0.0), "none": (0.0, 1.0)}
VERDICTS = {"1": True, "0": False, "none": None}


def read_stored():
    """Yield right answer, box, and what it earns in training and in evaluation, of each box in verdicts.txt."""
    for line in Path(__file__).with_name("verdicts.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            training, evaluation = line.split()[1:]
            continue
        gold, *boxes = line.split(" @ ")
        yield from ((gold, box, training, evaluation) for box in boxes)


def read_documented():
    """Yield the same of each row in the page's table."""
    lines = PAGE.read_text(encoding="utf-8").split(f"\n| {' | '.join(COLUMNS)} |\n")[1].splitlines()[1:]
    for line in itertools.takewhile(lambda line: line.startswith("| "), lines):
        gold, box, training, evaluation, why = re.split(r"(?<!\\)\|", line.strip().strip("|"))
        assert why.strip()
        gold, box = (cell.strip().strip("`").replace(r"\|", "|") for cell in (gold, box))
        yield gold, box, training.strip(), evaluation.strip()


STORED = list(read_stored())
DOCUMENTED = list(read_documented())


def test_both_lists_have_rows_of_every_outcome():
    assert len(STORED) >= 600
    assert len(DOCUMENTED) >= 9
    for rows in (STORED, DOCUMENTED):
        assert {training for _, _, training, _ in rows} == OUTCOMES.keys()
        assert {evaluation for _, _, _, evaluation in rows} == OUTCOMES.keys()


def test_boxes_earn_what_is_stated():
    wrong = []
    for gold, box, training, evaluation in dict.fromkeys(STORED + DOCUMENTED):
        results = [
            function("math500", rf"So it is \boxed{{{box}}}.", gold, extra_info={"index": 0})
            for function in (compute_score, compute_score_strict, compute_score_for_evaluation)
        ]
        score, undecided = OUTCOMES[training]
        stated = [(score, undecided), (1.0 if score else -1.0, undecided), OUTCOMES[evaluation]]
        earned = [(result["score"], result["undecided"]) for result in results]
        # It is symmetric.
        verdict = equal_answers(gold, box)
        formats = {result["format"] for result in results}
        if (earned, verdict, formats) != (stated, VERDICTS[evaluation], {1.0}):
            wrong.append((gold, box, earned, verdict, formats))
    assert wrong == []


@pytest.mark.parametrize("place", range(len(SPELLINGS["rewritten"])))
def test_without_a_rule_of_spelling_its_case_is_judged_otherwise(monkeypatch, place):
    *_, gold, box = SPELLINGS["rewritten"][place]
    verdicts_with_rule = (is_equivalent(box, gold), equal_answers(box, gold))
    rules = spelling._REWRITTEN
    monkeypatch.setattr(spelling, "_REWRITTEN", rules[:place] + rules[place + 1 :])
    verdicts_without_rule = (is_equivalent(box, gold), equal_answers(box, gold))
    assert verdicts_without_rule != verdicts_with_rule


# Some are units too, which an answer must not have in plain letters.
LETTERS = """
c d g h l m o s t ab bc cm ft st th mm km kg lb pm am cc mt lt sq gm hr yr
""".split()  # noqa: SIM905
ANSWERS = ["2", r"\frac{1}{3}", r"\sqrt{5}", "x+3", r"\pi r^{2}", "a+2", "(a+b)"]


@pytest.mark.parametrize("equal", [is_equivalent, equal_answers])
def test_letters_after_an_answer_are_variables(equal):
    for answer, letters in itertools.product(ANSWERS, LETTERS):
        for gold, box in ((answer, answer + letters), (answer + letters, answer), (answer, f"{answer} {letters}")):
            assert equal(box, gold) is not True, (gold, box)
    for letters in LETTERS:
        assert equal(f"2{letters[::-1]}", f"2{letters}") is True, letters


def test_all_accepted_answers_are_one_question():
    assert is_equivalent("x+1", "x", "1+x") is equal_answers("x+1", "x", "1+x") is True
    assert is_equivalent("x+1", "x", "2+x") is is_equivalent("x+1") is is_equivalent("", "5") is False
    assert is_equivalent("5", "") is is_equivalent("$", "$") is False
    assert is_equivalent("x+1", "x", "x+") is None  # the second can't be read
    assert is_equivalent("x+1", "x+", "1+x") is True


def test_a_pair_is_compared_once_and_numbers_need_no_process():
    equality._ask.cache_clear()
    assert [is_equivalent("a_1+b", "b+a_1") for _ in range(3)] == [True, True, True]
    assert is_equivalent("4", "5") is False and is_equivalent("4", "x+y", "4") is True
    assert equality._ask.cache_info()[:2] == (2, 1)  # hits and misses


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(1,2;3)", "commas and semicolons in one bracket: '1,2;3'"),
        (r"\frac{dy}{dx}", "a derivative, not a fraction"),
        (r"10\text{ girls and }12", "a second number, not a factor"),
    ],
)
def test_a_text_that_would_be_misread_is_read_once_and_the_message_says_why(monkeypatch, text, message):
    calls = []
    check_tree = comparison.check_tree

    def check_and_count(*arguments):
        calls.append(arguments)
        return check_tree(*arguments)

    monkeypatch.setattr(comparison, "check_tree", check_and_count)
    with pytest.raises(ValueError, match=message):
        comparison._parse_answer(text)
    assert len(calls) == 1


LISTS = yaml.safe_load(Path(__file__).with_name("spelling.yaml").read_text(encoding="utf-8"))
# Each the most of something that may be compared, and a little more.
BOUNDS = [
    ("x" * MAX_LENGTH, "x" * (MAX_LENGTH + 1)),
    ("2^{9999}", "2^{10000}"),
    ("9999^2", "9999!"),
    ("(" * MAX_DEPTH, "(" * (MAX_DEPTH + 1)),
    ("(" * (MAX_DEPTH - 1) + "[", "(" * MAX_DEPTH + "["),
    ("(" * (MAX_DEPTH - 1) + "{", "(" * MAX_DEPTH + "{"),
]


def test_numbers_by_hand():
    assert {text: str(parse_number(text)[0]) for text in LISTS["numbers"]} == LISTS["numbers"]


def test_texts_that_are_no_numbers_by_hand():
    too_long = "1" * (MAX_NUMBER_LENGTH + 1)
    assert [text for text in [*LISTS["no_numbers"], too_long] if parse_number(text)] == []


def test_a_percentage_is_a_share_and_its_number():
    assert parse_number(r"50\%") == (Fraction(1, 2), 50)


@pytest.mark.timeout(60)
def test_whether_a_long_sentence_is_words_takes_no_time():
    """If each word could match in two ways, a digit at the end would let the pattern try them all."""
    assert spelling.is_word("no" + ", a" * 60)
    assert not spelling.is_word("no" + ", a" * 60 + "1")
    assert spelling.is_word("the answer is five" * 8)
    assert not spelling.is_word("the answer is five " * 8 + "1")


def test_ordinary_answers_may_be_compared_and_bombs_may_not():
    # The first is Cyrillic.
    bombs = [*LISTS["bombs"], "\u0430", "1\u200b2", "1\n2", "1\x002", "(" * 1000 + "1" + ")" * 1000]
    assert [text for text in [*LISTS["safe"], *(most for most, _ in BOUNDS)] if not is_safe_to_parse(text)] == []
    assert [text for text in [*bombs, *(too_much for _, too_much in BOUNDS)] if is_safe_to_parse(text)] == []
