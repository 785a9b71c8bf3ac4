"""The graph: values, ops, differentiation, checking, planning."""

from treadle.graph.autograd import gradients
from treadle.graph.check import check
from treadle.graph.op import Cost, Graph, Launch, Node, Op, Temp
from treadle.graph.plan import Plan, plan
from treadle.graph.program import Memory, Program, memory
from treadle.graph.value import Buffer, Spec, Value

__all__ = [
    "Buffer",
    "Cost",
    "Graph",
    "Launch",
    "Memory",
    "Node",
    "Op",
    "Plan",
    "Program",
    "Spec",
    "Temp",
    "Value",
    "check",
    "gradients",
    "memory",
    "plan",
]
