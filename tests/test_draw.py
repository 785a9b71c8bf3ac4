"""The drawing of a graph: well-formed, complete, and laid out so that it can be read."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

import pytest

from treadle.graph import Graph, Program, gradients
from treadle.graph.draw import NODE_HEIGHT, NODE_WIDTH, draw
from treadle.models.gpt2 import GPT2
from treadle.ops.elementwise import add, mul
from treadle.ops.loss import mean_squared_error
from treadle.train.program import OptimizerSettings
from treadle.train.session import build_program

SVG = "{http://www.w3.org/2000/svg}"
MODEL = GPT2(vocab_size=40, n_layer=2, n_head=2, n_embd=16, block_size=8, dropout=0.1)
PROGRAM = build_program(MODEL, OptimizerSettings(), 4, 8, True)


def parsed(graph: Graph) -> ElementTree.Element:
    return ElementTree.fromstring(draw(graph))


def texts(root: ElementTree.Element) -> list[str]:
    return [t.text or "" for t in root.iter(f"{SVG}text")]


def boxes(root: ElementTree.Element) -> list[tuple[float, float, float, float]]:
    """left, top, right, bottom of every node."""
    found = []
    for g in root.iter(f"{SVG}g"):
        rect = g.find(f"{SVG}rect")
        assert rect is not None
        x, y = float(rect.attrib["x"]), float(rect.attrib["y"])
        found.append((x, y, x + NODE_WIDTH, y + NODE_HEIGHT))
    return found


@pytest.mark.parametrize("name", list(PROGRAM.graphs))
def test_every_graph_of_a_training_program_is_drawn_whole(name: str) -> None:
    graph = PROGRAM.graphs[name]
    root = parsed(graph)
    assert len(boxes(root)) == len(graph.nodes)
    titles = [t.text for t in root.iter(f"{SVG}title")]
    for node in graph.nodes:
        assert str(node) in titles
    edges = {
        (id(v), id(node)) for node in graph.nodes for v in node.inputs if v is not None and v.node
    }
    values = {str(v) for node in graph.nodes for v in node.outputs}
    assert sum(title in values for title in titles) == len(edges)


@pytest.mark.parametrize("name", list(PROGRAM.graphs))
def test_nodes_do_not_overlap_and_stay_inside_the_picture(name: str) -> None:
    root = parsed(PROGRAM.graphs[name])
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    found = boxes(root)
    for left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= width and bottom <= height
    for a, b in combinations(found, 2):
        apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
        assert apart


def test_the_forward_pass_runs_down_and_the_backward_pass_up_beside_it() -> None:
    graph = PROGRAM.graphs["micro_first"]
    place = dict(zip([n.name for n in graph.nodes], boxes(parsed(graph)), strict=True))
    forward = [place[n.name] for n in graph.nodes if not n.name.startswith("grad/")]
    backward = [place[n.name] for n in graph.nodes if n.name.startswith("grad/")]
    assert len({left for left, *_ in forward}) == 1
    tops = [top for _, top, *_ in forward]
    assert tops == sorted(tops) and len(set(tops)) == len(tops)
    assert min(left for left, *_ in backward) > max(right for _, _, right, _ in forward)
    for node in graph.nodes:
        for v in node.inputs:
            if v is not None and v.node is not None and node.name.startswith("grad/"):
                source, target = place[v.node.name], place[node.name]
                if not v.node.name.startswith("grad/") and any(o.users for o in node.outputs):
                    assert target[1] >= source[1]  # no higher than the value that it needs


def test_buffers_shapes_scopes_and_roles_are_named() -> None:
    words = texts(parsed(PROGRAM.graphs["micro_first"]))
    assert "embedding" in words
    assert "f32 [4, 8, 16]" in words
    assert {"h.0", "h.1", "grad"} <= set(words)
    assert {"weight", "grad", "input", "scalar", "output"} <= set(words)
    assert {"tokens", "targets", "loss", "transformer.wte.weight"} <= set(words)


def test_many_buffers_of_a_node_are_cut_short_with_their_number() -> None:
    graph = PROGRAM.graphs["update"]
    norm = next(n for n in graph.nodes if n.op.name == "global_norm")
    words = texts(parsed(graph))
    shown = int(next(w for w in words if w.startswith("and ")).split()[1])
    touched = {v.buffer.name for v in norm.inputs if v and v.buffer}
    touched |= {v.buffer.name for v in norm.outputs if v.buffer}
    assert 0 < shown < len(touched)


def test_names_are_escaped_and_small_graphs_are_drawn() -> None:
    program = Program()
    g = program.graph("a<b")
    x = g.read(program.buffer('x & "y"', (3,), "float32", "input"))
    w = g.read(program.buffer("<w>", (3,), "float32", "weight"))
    loss, _ = mean_squared_error(add(mul(x, w), w), x)
    assert len(boxes(parsed(g))) == len(g.nodes)
    program.buffer("<w>.grad", (3,), "float32", "grad")
    g.assign(program.buffers["<w>.grad"], gradients(loss, [w])[0])
    words = texts(parsed(g))
    assert {"a<b", 'x & "y"', "<w>", "<w>.grad"} <= set(words)


def test_an_empty_graph_is_drawn() -> None:
    assert "empty" in texts(parsed(Graph("empty")))
