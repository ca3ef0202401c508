"""The processes that take a step together."""

from .base import ALONE as ALONE
from .base import BLOCK_ROWS as BLOCK_ROWS
from .base import OtherRank as OtherRank
from .base import RankError as RankError
from .base import Ranks as Ranks
from .base import cause as cause
from .group import check_joined as check_joined
from .group import of as of
from .splitting import completed as completed
from .splitting import owned as owned
from .splitting import owners as owners

__all__ = [
    "ALONE",
    "BLOCK_ROWS",
    "OtherRank",
    "RankError",
    "Ranks",
    "cause",
    "check_joined",
    "completed",
    "of",
    "owned",
    "owners",
]
