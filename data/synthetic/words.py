"""The words of the texts: invented, without digits, not taken from any corpus."""

from __future__ import annotations

_COLOURS = (
    "amber", "ashen", "azure", "beige", "bronze", "cobalt", "copper", "coral", "crimson", "ebony", "emerald", "golden",
    "indigo", "ivory", "jade", "lilac", "maroon", "olive", "pearl", "purple", "russet", "scarlet", "silver", "violet",
)  # fmt: skip
_PLACES = (
    "anchor", "arch", "barn", "bridge", "cabin", "canal", "castle", "cellar", "chapel", "garden", "gate", "harbour",
    "island", "lantern", "market", "meadow", "mill", "orchard", "quarry", "stable", "temple", "tower", "tunnel", "well",
)  # fmt: skip
# The longest come last, where `_Longest` of data.synthetic.texts takes them.
COLOURS, PLACES = (tuple(sorted(words, key=len)) for words in (_COLOURS, _PLACES))
# Parts of filler sentences: subject, predicate, adverbial.
_WHO = ("The miller", "A tall child", "The old sailor", "Our neighbour", "A quiet nurse", "The baker", "Some traveller")
_DOES = ("sweeps the yard", "counts the clouds", "mends a net", "looks for a coat", "sings", "waits", "peels an apple")
_WHERE = ("by the river", "until noon", "under the oak", "before the rain", "behind the hill", "with a smile", "again")

SENTENCES = tuple(f" {who} {does} {where}." for who in _WHO for does in _DOES for where in _WHERE)
