"""The devices of a cluster, host by host, coloured by pipeline rank: svg for html pages."""

from collections.abc import Sequence
from html import escape

from ppctl.reports.page_kit import text
from ppctl.reports.palette import INK, PARTS

CELL, GAP = 24, 4  # svg units of a device, and between the hosts
NAMES = 52  # svg units of a host's name
MOST_ROWS = 16  # hosts in a column
MOST_WIDE = 32  # devices in a row; larger hosts take several rows
MOST_DEVICES = 2048


def cluster_svg(ranks: Sequence[tuple[str, int]], host_devices: int) -> str:
    """Return the svg of devices in order, with each device's rank, and a legend, as html.

    ranks: (description, number of devices) of each rank; ranks take the devices in order.
    host_devices: devices of a host. "" for more than MOST_DEVICES devices.
    """
    # 1. the rank of each device
    rank_of = [rank for rank, (_, number) in enumerate(ranks) for _ in range(number)]
    if len(rank_of) > MOST_DEVICES:
        return ""
    wide = min(host_devices, MOST_WIDE, len(rank_of))
    tall = -(-min(host_devices, len(rank_of)) // wide)
    num_hosts = -(-len(rank_of) // host_devices)
    columns = -(-num_hosts // MOST_ROWS)
    rows = -(-num_hosts // columns)

    # 2. a cell for each device, hosts below each other
    width, height = NAMES + wide * CELL + 3 * GAP, tall * CELL + GAP
    cells = ""
    for device, rank in enumerate(rank_of):
        host, place = divmod(device, host_devices)
        left, top = host // rows * width, host % rows * height
        x, y = left + NAMES + place % wide * CELL, top + place // wide * CELL
        if not place:
            name = f'<text class="host" x="{left}" y="{y + 16}">host {host}</text>'
            cells += name
        box = f'x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}"'
        cells += f"<g><title>{escape(f'device {device}: {ranks[rank][0]}')}</title>"
        cells += f'<rect {box} fill="{PARTS[rank % len(PARTS)]}"/>'
        cells += f'<text x="{x + CELL / 2}" y="{y + 16}">{rank}</text></g>'

    # 3. the figure and its legend
    size = f"{columns * width} {rows * height}"
    about = escape("; ".join(f"{name}: {number} devices" for name, number in ranks))
    frame = f'class="cluster" viewBox="0 0 {size}" width="{columns * width}" fill="{INK}"'
    items = ""
    for rank, (name, _) in enumerate(ranks):
        look = f'class="swatch" style="background:{PARTS[rank % len(PARTS)]}"'
        items += f"<li><span {look}>{rank}</span>{text(name)}</li>"
    svg = f'<svg {frame} role="img" aria-label="{about}">{cells}</svg>'
    return f'<div class="scroll">{svg}</div><ul class="parts">{items}</ul>'
