"""What a group's name that isn't there could have meant."""

from collections.abc import Iterable

from hydra.errors import ConfigCompositionException

from verl_clipx.common.suggestions import did_you_mean


class Missed:
    """The last group that Hydra asked a source for and that it does not have.

    Another source may have it. Where none has, Hydra next asks each source for the names in the group, for its message.
    """

    def __init__(self) -> None:
        self.path = ""

    def refuse(self, group: str, known: Iterable[str]) -> None:
        """Raises where the missed name of a group is almost a known one; otherwise Hydra lists what there is.

        Raises:
            ConfigCompositionException: names the nearest.
        """
        known, name = sorted(known), self.path.removeprefix(f"{group}/")
        hint = did_you_mean(name, known, f"+{group}=")
        if name != self.path and name not in known and hint:
            raise ConfigCompositionException(f"+{group}={name}: there is no such group.{hint}")
