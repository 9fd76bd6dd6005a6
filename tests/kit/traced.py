"""Compiled whole models beside unsharded ones: `TracedPair`, and the graphs that were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from tests.kit.models import Batch, Case, loss_of
from tests.kit.parity import Pair


class Graphs:
    """A backend that keeps the forward and the backward graphs, and runs them as they are."""

    def __init__(self) -> None:
        self.forward: list[torch.fx.GraphModule] = []
        self.backward: list[torch.fx.GraphModule] = []
        self.frames = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        self.frames += 1
        compile_both = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_both(graph, inputs)

    def _keep(self, graphs: list[torch.fx.GraphModule]) -> Callable[..., Any]:
        from functorch.compile import make_boxed_func

        def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            graphs.append(graph)
            return make_boxed_func(lambda *args: graph(*args))  # as it is then, see ``change``

        return keep

    def change(self, how: Callable[[torch.fx.Graph], None]) -> None:
        """Change all graphs that were made; the next step runs them so."""
        for graph in (*self.forward, *self.backward):
            how(graph.graph)
            graph.recompile()

    @property
    def counts(self) -> str:
        return f"{len(self.forward)} forward, {len(self.backward)} backward"

    def describe(self) -> str:
        """Say how many graphs there are, and which collectives are in each."""
        lines = [
            f"{name}: {collectives(graph)}"
            for name, graphs in (("forward", self.forward), ("backward", self.backward))
            for graph in graphs
        ]
        return "\n".join(lines)


def collectives(graph: torch.fx.GraphModule) -> str:
    """Count the collectives of a graph."""
    found: dict[str, int] = {}
    for node in graph.graph.nodes:
        name = str(node.target)
        if "c10d" in name and "wait_tensor" not in name:
            short = name.split(".")[1].removesuffix("_coalesced")
            short = short.removesuffix("_into_tensor").removesuffix("_tensor")
            found[short] = found.get(short, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"


def saved(graph: torch.fx.GraphModule, outputs: int) -> list[Tensor]:
    """Return what a forward graph makes and keeps for backward, behind its outputs; no inputs."""
    (node,) = (node for node in graph.graph.nodes if node.op == "output")
    kept = [value for value in node.args[0][outputs:] if isinstance(value, torch.fx.Node)]
    return [value.meta["val"] for value in kept if value.op != "placeholder"]


class TracedPair(Pair):
    """A compiled sharded model, and an unsharded one on the global batch."""

    def __init__(
        self,
        case: Case | str,
        *,
        backend: Any = None,
        dynamic: bool | None = None,
        overlap: bool | None = None,
        bucket: bool = True,
        fullgraph: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(case, **kwargs)
        self.graphs = Graphs()
        self.compiled = fsdp2.compile(
            self.model,
            backend=backend or self.graphs,
            fullgraph=fullgraph,
            dynamic=dynamic,
            overlap=overlap,
            bucket=bucket,
        )
        self.eagerly = False

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        if model is self.model and not self.eagerly:
            model = self.compiled
        return loss_of(model(*batch.args, **batch.kwargs))
