"""A graph as a picture: `draw(graph)` returns the text of an SVG file.

Forward nodes run down the left column in their order. What the backward pass computes runs up
beside them, each node no higher than the forward values it needs, and the results that go into
buffers alone (weight gradients) stand to its right. Buffers are rounded boxes at the side of the
nodes that touch them, coloured by role; scopes are frames.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from treadle.graph.autograd import BACKWARD_SCOPE
from treadle.graph.op import Graph, Node
from treadle.graph.value import ROLES, SUFFIX, Buffer, Value

# Sizes in pixels.
NODE_WIDTH, NODE_HEIGHT = 200, 38
PILL_WIDTH, PILL_HEIGHT, PILL_STEP = 186, 17, 20
ROW, MARGIN, HEAD = 66, 24, 66
ARM = 30  # from a node to its buffers
FAR = 12  # rows from which on an edge is drawn thin
PILLS = 7  # shown beside a node; a line says how many more there are

# Left edges of the columns: forward, backward, results of the backward pass.
FORWARD, BACKWARD, RESULTS = 0, 1, 2
COLUMN_X = (MARGIN + PILL_WIDTH + ARM, 720, 1000)

COLORS = {
    "weight": "#cfe2ff",
    "shadow": "#a9c7f7",
    "grad": "#ffd8b1",
    "state": "#e2d3f5",
    "input": "#cdeccd",
    "scalar": "#e6e6e6",
    "output": "#ffc9d0",
}
OTHER = "#fff3b8"  # of every other role
INK, FAINT, EDGE, SAVED = "#1f2430", "#6b7280", "#4b5563", "#9aa5b8"
FRAMES = ("#f6f8fb", "#f1f4f9")


def draw(graph: Graph) -> str:
    """The graph as an SVG document, well-formed XML."""
    layout = _Layout(graph)
    parts = [
        _style(layout.width, layout.height),
        *_frames(layout),
        *_edges(layout),
        *(part for node in graph.nodes for part in _node(layout, node)),
        *_head(graph),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------- layout


@dataclass
class _Pill:
    """A buffer beside a node: what the node does with it."""

    buffer: Buffer
    reads: bool
    writes: bool


class _Layout:
    """The column and row of every node, and the height of every row."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.column = _columns(graph)
        self.row = _rows(graph, self.column)
        self.pills = {id(node): _pills(node) for node in graph.nodes}
        count = max(self.row.values(), default=0) + 1
        heights = [ROW] * count
        for node in graph.nodes:
            stack = min(len(self.pills[id(node)]), PILLS + 1) * PILL_STEP + 12
            heights[self.row[id(node)]] = max(heights[self.row[id(node)]], stack)
        self.top = [HEAD]
        for height in heights:
            self.top.append(self.top[-1] + height)
        self.height = self.top[-1] + MARGIN
        last = max(self.column.values(), default=FORWARD)
        self.width = COLUMN_X[last] + NODE_WIDTH + ARM + PILL_WIDTH + MARGIN

    def box(self, node: Node) -> tuple[float, float]:
        """The top left corner of a node."""
        row = self.row[id(node)]
        middle = (self.top[row] + self.top[row + 1]) / 2
        return COLUMN_X[self.column[id(node)]], middle - NODE_HEIGHT / 2

    def adjacent(self, a: Node, b: Node) -> bool:
        """Whether no node stands between two of one column."""
        low, high = sorted((self.row[id(a)], self.row[id(b)]))
        return not any(
            low < self.row[key] < high and column == self.column[id(a)]
            for key, column in self.column.items()
        )


def _columns(graph: Graph) -> dict[int, int]:
    """By id of a node: what depends on the backward pass stands at the right."""
    column: dict[int, int] = {}
    for node in graph.nodes:
        back = node.name.startswith(BACKWARD_SCOPE + "/") or any(
            column[id(source)] != FORWARD for source in _sources(node)
        )
        used = any(v.users for v in node.outputs)
        column[id(node)] = (BACKWARD if used else RESULTS) if back else FORWARD
    return column


def _rows(graph: Graph, column: dict[int, int]) -> dict[int, int]:
    """By id of a node: forward rows go down in order, backward rows up, one node a place. A
    backward node has as many rows as there are results that it is the last to give something."""
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    sides: tuple[list[Node], ...] = ([], [], [])
    for node in graph.nodes:
        sides[column[id(node)]].append(node)
    results: dict[int | None, list[Node]] = {}
    for node in sides[RESULTS]:
        givers = [id(s) for s in _sources(node) if column[id(s)] == BACKWARD]
        results.setdefault(max(givers, key=order.__getitem__, default=None), []).append(node)

    row = {id(node): i for i, node in enumerate(sides[FORWARD])}
    free = 0
    for node in reversed(sides[BACKWARD]):
        needed = [row[id(s)] for s in _sources(node) if column[id(s)] == FORWARD]
        row[id(node)] = max([free, *needed])
        mine = results.get(id(node), [])
        row.update((id(result), row[id(node)] + i) for i, result in enumerate(mine))
        free = row[id(node)] + max(1, len(mine))
    # Forward nodes move down to where the backward pass uses them, as far as their order permits.
    limit = max(row.values(), default=0)
    for node in reversed(sides[FORWARD]):
        users = [u for v in node.outputs for u in v.users if column[id(u)] == BACKWARD]
        row[id(node)] = limit = min([limit, *(row[id(u)] for u in users)])
        limit -= 1
    taken = {row[id(node)] for node in sides[RESULTS] if id(node) in row}
    for node in results.get(None, []):
        at = max((row[id(s)] for s in _sources(node)), default=0)
        row[id(node)] = _nearest_free(at, taken)
        taken.add(row[id(node)])
    return row


def _nearest_free(wanted: int, taken: set[int]) -> int:
    """The free row nearest to `wanted`, the upper one of two."""
    distance = 0
    while True:
        for row in (wanted - distance, wanted + distance):
            if row >= 0 and row not in taken:
                return row
        distance += 1


def _sources(node: Node) -> list[Node]:
    return list(dict.fromkeys(v.node for v in node.inputs if v is not None and v.node is not None))


def _pills(node: Node) -> list[_Pill]:
    """The buffers that a node reads or writes, those that it reads first."""
    reads = [v.buffer for v in node.inputs if v is not None and v.node is None and v.buffer]
    writes = [v.buffer for v in node.outputs if v.buffer]
    return [_Pill(b, b in reads, b in writes) for b in dict.fromkeys([*reads, *writes])]


# ---------------------------------------------------------------- drawing


def _style(width: float, height: float) -> str:
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" \
viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif">
<defs>
{_arrow("end", EDGE)}
{_arrow("saved", SAVED)}
</defs>
<rect width="100%" height="100%" fill="#ffffff"/>"""


def _arrow(name: str, color: str) -> str:
    return (
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerUnits="userSpaceOnUse" '
        f'markerWidth="8" markerHeight="8" orient="auto-start-reverse">'
        f'<path d="M0 0.8 L8 4 L0 7.2 z" fill="{color}"/></marker>'
    )


def _head(graph: Graph) -> Iterable[str]:
    cost = graph.cost()
    size = f"{len(graph.nodes)} nodes, {cost.flops:,} FLOP, {cost.nbytes:,} bytes moved"
    yield _text(MARGIN, 26, graph.name, 16, bold=True)
    yield _text(MARGIN + 10 * len(graph.name) + 16, 26, size, 11, FAINT)
    x = MARGIN
    roles = {p.buffer.role for node in graph.nodes for p in _pills(node)}
    for role in (r for r in ROLES if r in roles):
        fill = COLORS.get(role, OTHER)
        yield f'<rect x="{x}" y="38" width="12" height="12" rx="4" fill="{fill}"/>'
        yield _text(x + 17, 48, role, 11, FAINT)
        x += 30 + 7 * len(role)


def _frames(layout: _Layout) -> Iterable[str]:
    """A frame around the neighbours in a column that share a scope."""
    for column in (FORWARD, BACKWARD):
        nodes = [n for n in layout.graph.nodes if min(layout.column[id(n)], BACKWARD) == column]
        shade = 0
        for scope, group in _runs(nodes):
            if not scope:
                continue
            corners = [layout.box(n) for n in group]
            left, top = min(x for x, _ in corners) - 12, min(y for _, y in corners) - 20
            right, bottom = max(x for x, _ in corners) + NODE_WIDTH + 12, max(y for _, y in corners)
            yield (
                f'<rect x="{left}" y="{top}" width="{right - left}" '
                f'height="{bottom + NODE_HEIGHT + 10 - top}" rx="8" fill="{FRAMES[shade % 2]}" '
                f'stroke="#d5dbe6"/>'
            )
            yield _text(left + 8, top + 13, scope, 10, FAINT)
            shade += 1


def _runs(nodes: Sequence[Node]) -> list[tuple[str, list[Node]]]:
    runs: list[tuple[str, list[Node]]] = []
    for node in nodes:
        scope = node.name.rpartition("/")[0]
        if not runs or runs[-1][0] != scope:
            runs.append((scope, []))
        runs[-1][1].append(node)
    return runs


def _edges(layout: _Layout) -> Iterable[str]:
    for node in layout.graph.nodes:
        for value in dict.fromkeys(node.inputs):
            if value is not None and value.node is not None:
                yield _edge(layout, value.node, node, value)


def _edge(layout: _Layout, source: Node, target: Node, value: Value) -> str:
    (x1, y1), (x2, y2) = layout.box(source), layout.box(target)
    columns = layout.column[id(source)], layout.column[id(target)]
    middle, rows = NODE_HEIGHT / 2, abs(layout.row[id(source)] - layout.row[id(target)])
    saved = columns[0] == FORWARD != columns[1]
    if columns[0] == columns[1]:
        down = y2 > y1
        start, end = (y1 + NODE_HEIGHT, y2) if down else (y1, y2 + NODE_HEIGHT)
        if layout.adjacent(source, target):
            x = x1 + NODE_WIDTH / 2
            path = f"M{x} {start} L{x} {end}"
        else:  # past the nodes between, the farther out the more there are
            side = x1 + NODE_WIDTH if columns[0] == FORWARD else x1
            away = (18 + min(10 * rows, 90)) * (1 if columns[0] == FORWARD else -1)
            path = (
                f"M{side} {y1 + middle} C{side + away} {y1 + middle} {side + away} {y2 + middle} "
                f"{side} {y2 + middle}"
            )
    elif columns == (FORWARD, RESULTS):  # through the gap above the row of its target
        gap, inner = y2 - 9, COLUMN_X[BACKWARD] - 6
        outer = COLUMN_X[BACKWARD] + NODE_WIDTH + 6
        path = (
            f"M{x1 + NODE_WIDTH} {y1 + middle} C{x1 + NODE_WIDTH + 90} {y1 + middle} "
            f"{inner - 90} {gap} {inner} {gap} L{outer} {gap} "
            f"C{outer + 34} {gap} {x2 - 34} {y2 + middle - 8} {x2} {y2 + middle - 8}"
        )
    else:
        start, end = x1 + NODE_WIDTH, x2
        bend = min(90.0, (end - start) / 2)
        path = (
            f"M{start} {y1 + middle} C{start + bend} {y1 + middle} {end - bend} {y2 + middle} "
            f"{end} {y2 + middle}"
        )
    color, marker = (SAVED, "saved") if saved else (EDGE, "end")
    width = 1.2 if rows <= FAR else 0.5
    return (
        f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
        f'marker-end="url(#{marker})"><title>{escape(str(value))}</title></path>'
    )


def _node(layout: _Layout, node: Node) -> Iterable[str]:
    x, y = layout.box(node)
    yield f"<g><title>{escape(str(node))}</title>"
    yield (
        f'<rect x="{x}" y="{y}" width="{NODE_WIDTH}" height="{NODE_HEIGHT}" rx="3" '
        f'fill="#ffffff" stroke="{INK}"/>'
    )
    yield _text(x + 9, y + 16, node.op.name, 12, bold=True)
    label, room = _label(node), int((NODE_WIDTH - 26 - 7.6 * len(node.op.name)) / 5.4)
    if label and room > 5:
        yield _text(x + NODE_WIDTH - 9, y + 16, _short(label, room), 10, FAINT, anchor="end")
    first = node.outputs[0]
    shape = f"{SUFFIX[first.dtype]} [{', '.join(map(str, first.shape))}]"
    more = f"  + {len(node.outputs) - 1}" if len(node.outputs) > 1 else ""
    yield _text(x + 9, y + 31, shape + more, 10.5, FAINT)
    yield "</g>"
    yield from _stack(layout, node, x, y + NODE_HEIGHT / 2)


def _label(node: Node) -> str:
    """What a node is called within its scope, where that says more than its op."""
    label = node.name.rpartition("/")[2]
    return "" if node.op.name.startswith(label.rstrip("_0123456789")) else label


def _stack(layout: _Layout, node: Node, x: float, middle: float) -> Iterable[str]:
    """The buffers of a node: at its left, and at the right of the last column."""
    pills = layout.pills[id(node)]
    at_right = layout.column[id(node)] == RESULTS
    left = x + NODE_WIDTH + ARM if at_right else x - ARM - PILL_WIDTH
    inner, outer = (x + NODE_WIDTH, left) if at_right else (x, left + PILL_WIDTH)
    shown = pills[:PILLS]
    y = middle - (len(shown) + (len(pills) > PILLS)) * PILL_STEP / 2
    for pill in shown:
        center = y + PILL_STEP / 2
        marks = ' marker-start="url(#end)"' * pill.writes + ' marker-end="url(#end)"' * pill.reads
        yield (
            f'<path d="M{outer} {center} C{(outer + inner) / 2} {center} {(outer + inner) / 2} '
            f'{middle} {inner} {middle}" fill="none" stroke="{EDGE}" stroke-width="0.9"{marks}/>'
        )
        yield (
            f'<rect x="{left}" y="{center - PILL_HEIGHT / 2}" width="{PILL_WIDTH}" '
            f'height="{PILL_HEIGHT}" rx="8" fill="{COLORS.get(pill.buffer.role, OTHER)}">'
            f"<title>{escape(str(pill.buffer))}</title></rect>"
        )
        yield _text(
            left + PILL_WIDTH / 2, center + 3.5, _short(pill.buffer.name, 34), 10, anchor="middle"
        )
        y += PILL_STEP
    if len(pills) > PILLS:
        more = f"and {len(pills) - PILLS} more"
        yield _text(left + PILL_WIDTH / 2, y + 13, more, 10, FAINT, anchor="middle")


def _short(name: str, length: int) -> str:
    """The end of a name, which tells more than its beginning."""
    return name if len(name) <= length else "…" + name[1 - length :]


def _text(
    x: float,
    y: float,
    text: str,
    size: float,
    color: str = INK,
    *,
    bold: bool = False,
    anchor: str = "start",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )
