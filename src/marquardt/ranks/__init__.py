"""The processes that take a step together."""

from .base import ALONE as ALONE
from .base import OtherRank as OtherRank
from .base import RankError as RankError
from .base import Ranks as Ranks
from .base import cause as cause
from .group import of as of
from .splitting import completed as completed
from .splitting import owned as owned
from .splitting import owners as owners

__all__ = ["ALONE", "OtherRank", "RankError", "Ranks", "cause", "completed", "of", "owned", "owners"]
