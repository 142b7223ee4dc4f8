"""The difficulty of generated Countdown problems."""

from dataclasses import dataclass

OPERATORS = "+-*/"


@dataclass(frozen=True)
class CountdownConfig:
    """Difficulty of the generated problems.

    A policy of about a million parameters learns the default problems in minutes. The papers' problems have 3 or 4
    numbers up to 99 and all four operators.

    Args:
        min_numbers: smallest count of numbers in a problem, 2 to 6.
        max_numbers: largest count of numbers in a problem, `min_numbers` to 6.
        min_value: smallest number, at least 1.
        max_value: largest number, `min_value` to 1000.
        min_target: smallest target, at least 0.
        max_target: largest target, `min_target` to 100000.
        operators: operators from which solutions are built, as distinct characters of "+-*/". Answers may use all four.

    Raises:
        ValueError: a value is of the wrong type or outside its range; the message names the key.
    """

    min_numbers: int = 3
    max_numbers: int = 3
    min_value: int = 1
    max_value: int = 20
    min_target: int = 1
    max_target: int = 60
    operators: str = "+-"

    def __post_init__(self) -> None:
        ranges = {
            "min_numbers": (2, 6),
            "max_numbers": (self.min_numbers, 6),
            "min_value": (1, 1000),
            "max_value": (self.min_value, 1000),
            "min_target": (0, 100_000),
            "max_target": (self.min_target, 100_000),
        }
        for key, (low, high) in ranges.items():
            value = getattr(self, key)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{key}={value!r} is not an integer from {low} to {high}; give one in that range")
        operators = self.operators
        if not isinstance(operators, str) or not operators or len(set(operators) & set(OPERATORS)) != len(operators):
            raise ValueError(f"operators={operators!r} is not a set of distinct characters of {OPERATORS!r}; list some")
