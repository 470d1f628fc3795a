"""Colours of kinds and chunks, the same in every format."""

from ppctl.schedule.ir import Kind

# Okabe and Ito, Color Universal Design, 2008: hues for any kind of colour blindness, under dark
# letters. Vocabulary tasks have two more of these hues and two greys.
COLOURS: dict[Kind, str] = {
    "F": "#56b4e9",
    "B": "#e69f00",
    "I": "#22a884",
    "W": "#cc79a7",
    "S": "#f0e442",
    "T": "#e07b39",
    "E": "#d0d0d0",
    "G": "#a8a8a8",
}
# Hues under dark letters for parts of a bar: Tol, Colour Schemes, `light`, 2021.
PARTS = ("#77aadd", "#99ddff", "#44bb99", "#bbcc33", "#ee8866", "#eedd88", "#ffaabb", "#dddddd")
# Hues for lines on light and dark paper: Okabe and Ito again.
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKS = ("o", "s", "^", "D")  # marks of lines; colour and mark together identify a line
SIGNS = "●■▲◆"  # the marks as characters
INK = "#10151c"  # colour of letters in cells
LIGHTEST = 0.55  # share of white in the last chunk


def shade(kind: Kind, chunk: int, num_chunks: int) -> str:
    """Return the colour of a kind in a chunk: full in the first chunk, palest in the last.

    >>> shade("F", 0, 2), shade("F", 1, 2)
    ('#56b4e9', '#b3ddf5')
    """
    white = LIGHTEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    red, green, blue = (int(COLOURS[kind][i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in (red, green, blue))


def line_style(number: int) -> tuple[str, str]:
    """Return the (colour, mark) of a line; the first 16 pairs differ.

    >>> line_style(0), line_style(4)
    (('#0072b2', 'o'), ('#0072b2', 's'))
    """
    return LINES[number % len(LINES)], MARKS[(number + number // len(LINES)) % len(MARKS)]
