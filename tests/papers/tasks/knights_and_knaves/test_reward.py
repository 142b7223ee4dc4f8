"""Logic-RL's reward: every total by hand, both kinds of prompt, hostile text, and thousands of generated completions.

The generated ones are scored again by a rule written here. Not covered: verl's reward manager (test_dataset.py).
"""

import random
import re
import time

import pytest

from verl_clipx.papers.tasks.knights_and_knaves import words
from verl_clipx.papers.tasks.knights_and_knaves.reward import TAGS, compute_score

TRUTH = "(1) Zoey is a knight\n(2) Liam is a knave\n(3) Ava is a knight"
ANSWER = TRUTH
PROMPT = "<|im_start|>system\nUse <think> </think> and<answer> </answer>.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"

RIGHT = {"score": 3.0, "acc": 1.0, "format": 1.0, "parsed": 1.0}
WRONG = {"score": -0.5, "acc": 0.0, "format": 1.0, "parsed": 1.0}
UNPARSED = {"score": -1.0, "acc": 0.0, "format": 1.0, "parsed": 0.0}
NO_FORMAT = {"score": -3.0, "acc": 0.0, "format": 0.0, "parsed": 0.0}


def score(text, truth=TRUTH, **kwargs):
    return compute_score("knights_and_knaves", text, truth, extra_info={"index": 0}, more=1, **kwargs)


def respond(answer=ANSWER, reasoning="Zoey cannot lie."):
    return f"{reasoning}</think><answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ANSWER, RIGHT),
        ("zoey IS A Knight, liam is  a\nknave, ava is a knight", RIGHT),
        ("Ava is a knight. Liam is a knave. Zoey is a knight.", RIGHT),
        ("So: **Zoey is a knight**; (Liam is a knave); Ava is a knight", RIGHT),
        (ANSWER.replace("knave", "knight"), WRONG),
        ("(1) Zoey is a knave\n(2) Liam is a knight\n(3) Ava is a knave", WRONG),
        ("(1) Zoey is a knight\n(2) Liam is a knave", UNPARSED),  # somebody is missing
        (f"{ANSWER}\n(4) Mia is a knight", UNPARSED),  # somebody too many
        (f"{ANSWER} and Ava is a knave", UNPARSED),  # both kinds
        ("Zoey is a knight, Zoey is a knave, Ava is a knight", UNPARSED),
        ("Zoey and Ava are knights, Liam is a knave", UNPARSED),
        ("Zoey: knight, Liam: knave, Ava: knight", UNPARSED),
        (ANSWER.replace("is a", "is not a"), UNPARSED),
        (ANSWER.replace("Ava", "Eva"), UNPARSED),
        (ANSWER.replace("Ava", "Avarice"), UNPARSED),
        (ANSWER.replace("Ava", "Аva"), UNPARSED),  # Cyrillic A
        (ANSWER.replace("Ava", "éAva"), UNPARSED),
        (ANSWER.replace("knight", "\u212anight"), UNPARSED),  # the Kelvin sign lower-cases to k
        ("", UNPARSED),
        ("   ", UNPARSED),
    ],
)
def test_answers_by_hand(answer, expected):
    assert score(respond(answer)) == expected
    assert score(f"<think>{respond(answer)}") == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        ANSWER,
        f"<answer>{ANSWER}</answer>",
        f"</think><answer>{ANSWER}",
        f"</think>{ANSWER}</answer>",
        f"<answer>{ANSWER}</answer></think>",
        f"</think></answer>{ANSWER}<answer>",
        respond() + "</answer>",
        respond() + respond(),
        respond(reasoning="</think>"),
        respond(reasoning="<answer>"),
        respond().replace("</think>", "</Think>"),
        respond().replace("</think>", "< /think>"),
        respond().replace("<answer>", "＜answer＞"),
        f"<think>{respond(reasoning='<think>')}",
    ],
)
def test_wrong_form_scores_the_least_though_the_answer_is_right(text):
    assert score(text) == NO_FORMAT


def test_names_of_any_letters():
    truth = "(1) Łukasz is a knight\n(2) Zoë is a knave"
    assert score(respond("Zoë is a knave, Łukasz is a knight"), truth) == RIGHT
    assert score(respond("Zoe is a knave, Łukasz is a knight"), truth) == UNPARSED


def test_text_around_the_tags_is_allowed():
    assert score(f"Well. <think>{respond()} Done. Zoey is a knave.") == RIGHT


@pytest.mark.parametrize(
    ("think_in_prompt", "with_think", "without_think"),
    [(None, RIGHT, RIGHT), (True, NO_FORMAT, RIGHT), (False, RIGHT, NO_FORMAT)],
)
def test_who_opens_the_reasoning(think_in_prompt, with_think, without_think):
    assert score(f"<think>{respond()}", think_in_prompt=think_in_prompt) == with_think
    assert score(respond(), think_in_prompt=think_in_prompt) == without_think


@pytest.mark.parametrize("think_in_prompt", [None, True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{PROMPT}<|im_start|>assistant\n<think>{respond()}", RIGHT),
        (
            f"{PROMPT}<|im_start|>assistant\n<think>{respond(ANSWER.replace('Zoey is a knight', 'Zoey is a knave'))}",
            WRONG,
        ),
        (f"{PROMPT}<|im_start|>assistant\n{respond()}", NO_FORMAT),
        (f"{PROMPT}<|im_start|>assistant\n<think><think>{respond()}", NO_FORMAT),
        (f"The user asks a question. <answer>x</answer>\nUser:Who?\nAssistant: <think>{respond()}", RIGHT),
        (f"Assistant: <think>{respond()}", RIGHT),
        (f"<|im_start|>assistant\n<think>{respond()}", RIGHT),
    ],
)
def test_prompt_and_response_together_as_the_release_reads_them(text, expected, think_in_prompt):
    assert score(text, think_in_prompt=think_in_prompt) == expected


def test_a_marker_inside_a_response_cuts_nothing_off():
    assert score(f"</think> oh no. Assistant: <think>{respond()}") == NO_FORMAT
    assert score(f"</think><|im_start|>assistant<think>{respond()}") == NO_FORMAT
    assert score(respond(reasoning="The Assistant: me. ")) == RIGHT


def test_ground_truth_of_the_released_files():
    assert score(respond(), {"solution_text_format": TRUTH, "statements": "(('lying', 1),)"}) == RIGHT


PIECES = (
    *TAGS * 3,
    *"<>/ \n,.:;*()",
    *("Zoey is a knight", "Liam is a knave", "Ava is a knight", "Zoey is a knave", "Liam is not a knight"),
    *("Mia is a knave", "knight", "knave", "Zoey", "is a", "THINK", "Assistant:", "<|im_start|>assistant", "٣"),
    *("Ｋnight", "\x00", "\ud800", "{0}", "%s", "\\", "__import__('os')", "((((", "9**9**9"),
)


def expected_score(text: str) -> float:
    """The rule once more: tags by a regular expression over the whole text, kinds by splitting into words."""
    if re.match(r"\s*(<\|im_start\|>|Assistant:)", text):
        text = re.split(r"<\|im_start\|>assistant|Assistant:", text, maxsplit=1)[1]
    elif "<think>" not in text:
        text = "<think>" + text
    if re.findall(r"</?(?:think|answer)>", text) != list(TAGS):
        return -3.0
    answer = re.search(r"<answer>(.*)</answer>", text, re.DOTALL)[1].lower()
    if len(re.findall("knight|knave", answer, re.ASCII)) != 3:
        return -1.0
    words = re.findall(r"\w+|[^\w\s]", answer)
    said = {}
    for name, verb, article, kind in zip(words, words[1:], words[2:], words[3:], strict=False):
        if (verb, article) == ("is", "a") and kind in ("knight", "knave"):
            said.setdefault(name, kind)
    if not {"zoey", "liam", "ava"} <= said.keys():
        return -1.0
    return 3.0 if (said["zoey"], said["liam"], said["ava"]) == ("knight", "knave", "knight") else -0.5


def completions(count: int):
    rng = random.Random(0)
    for _ in range(count):
        if rng.random() < 0.4:
            yield "".join(rng.choices(PIECES, k=rng.randint(0, 14)))
            continue
        # A right or nearly right response with something put in or cut out.
        lines = [f"{name} is a {rng.choice(['knight', 'knave'])}" for name in rng.sample(["Zoey", "Liam", "Ava"], 3)]
        text = rng.choice(["", "<think>", "Assistant:<think>"]) + respond(rng.choice(["\n", ", "]).join(lines))
        for _ in range(rng.randint(0, 2)):
            start = rng.randrange(len(text) + 1)
            text = text[:start] + rng.choice(("", " ", *PIECES)) + text[start + rng.choice([0, 0, 1, 6]) :]
        yield text


def test_fifteen_thousand_completions_agree_with_the_rule():
    totals = []
    for text in completions(15_000):
        result = score(text)
        assert result["score"] == expected_score(text), text
        assert result == {3.0: RIGHT, -0.5: WRONG, -1.0: UNPARSED, -3.0: NO_FORMAT}[result["score"]]
        totals.append(result["score"])
    # Every outcome must have been met often, or the comparison shows little.
    assert all(totals.count(total) > 300 for total in (3.0, -0.5, -1.0, -3.0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Analyze it. We considered, looked at and CHECKED it; examine", {"analysis": 5}),
        ("Reconsider, checking, analyzes, look up", {}),
        ("Zoey's statement and Liam\u2019s statements, James' statement, but this statement", {"statement": 3}),
        ("Since A, because B, due to C, given that D", {"causal_indicator": 4}),
        ("So. Thus; hence, as a result: consequently, therefore", {"conclusion_indicator": 6}),
        ("Also, soon", {}),
        ("Assume A. I assumed B. If C is a knave, then D is. If E\nthen F. If G. Then H", {"assumption": 3}),
        ("He must be one, a definite one, definitely", {"assertion": 2}),
        ("if " * 10_000 + "a's " * 10_000, {}),  # and no time
    ],
)
def test_inference_related_words_by_hand(text, expected):
    """Table 5 of AR-Lopti. Whether the paper counts the same way is not known: it says frequency."""
    started = time.process_time()
    parts = words.compute_score("knights_and_knaves", f"{text}\n{respond()}", TRUTH)
    assert {name: int(parts[name]) for name in words.CATEGORIES if parts[name]} == expected
    assert RIGHT.items() <= parts.items()
    # Ample for one pass on a busy machine.
    assert time.process_time() - started < 10
