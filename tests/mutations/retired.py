"""Mutations of what is no longer there. Earlier results have them, and nobody misses them in a later one."""

from __future__ import annotations

RETIRED: dict[str, tuple[str, ...]] = {  # by the reason
    "uphill moves are no loans any more: haven, return, patience and ceiling did not earn their place": (
        "policies: another weight decay moves the best loss with the model, not with the haven",
        "policies: weight decay of the haven is forgotten",
        "policies: the haven has the weight decay of the model",
        "policies: a loan is overdue one step too late",
        "policies: a loan that has paid is taken back",
        "policies: loans go on when the data change",
        "policies: the haven has the loss after the move",
        "policies: steps away from the haven are not counted",
        "policies: the haven moves with every uphill step",
        "policies: no ceiling after a loan that did not pay",
        "policies: the ceiling is lifted at once",
        "policies: uphill beyond the ceiling",
        "policies: a return ends with the loss that it gave up",
        "policies: a return stays where it is",
        "policies: the average takes loans for steps",
        "parts: a return is no failure",
    ),
}

NAMES = frozenset(name for names in RETIRED.values() for name in names)
