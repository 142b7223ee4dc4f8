"""The page's colours, one meaning each, and how far apart they are to people who see fewer of them."""

# GRPO and its bounds, the yardstick; then the other settings that are compared, in the order in which they were named.
GRPO = "#404040"
OTHERS = ("#1f66e5", "#1d723f", "#5c2c00")
# What happened to a token: clipped at the lower bound, at the upper bound. Kept tokens are ink and differ by shape.
CLIPPED_LOW, CLIPPED_HIGH = "#d1450f", "#a3268c"
COLOURS = (GRPO, *OTHERS, CLIPPED_LOW, CLIPPED_HIGH)
INK, SOFT, HAIR = "#1a1a1a", "#636363", "#9a9a9a"

CLOSEST = {"vision": "tritanopia", "value": 22}
"""The distance of the closest pair, CIE 1976, to those who see them closest; 2.3 is just noticeable."""
