"""Which ranks form which group. Pure arithmetic on sizes, used by `mcore.parallel` to make process groups.

Rank order, fastest first: tensor, context, data, pipeline (Megatron's "tp-cp-ep-dp-pp"). Experts are shared out
over ranks that hold the same dense parameters: neighbours on the context and data axes together.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

Axis = Literal["tensor", "context", "data", "pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Sizes of the axes. The groups of a kind share no rank, and their ranks ascend.

    Attributes:
        expert: ranks that share out the experts of a layer; divides context * data.
    """

    tensor: int
    data: int
    pipeline: int
    context: int = 1
    expert: int = 1

    def rank(self, *, tensor: int, data: int, pipeline: int, context: int = 0) -> int:
        """Global rank of a coordinate."""
        return ((pipeline * self.data + data) * self.context + context) * self.tensor + tensor

    def groups(self, *axes: Axis) -> list[list[int]]:
        """One group per coordinate on the other axes, with all ranks along `axes`."""
        found: dict[tuple[int, ...], list[int]] = {}
        # Slowest axis first, as the ranks ascend.
        sizes: dict[Axis, int] = {
            "pipeline": self.pipeline, "data": self.data, "context": self.context, "tensor": self.tensor
        }  # fmt: skip
        for rank, coordinate in enumerate(itertools.product(*map(range, sizes.values()))):
            fixed = tuple(at for axis, at in zip(sizes, coordinate, strict=True) if axis not in axes)
            found.setdefault(fixed, []).append(rank)
        return list(found.values())

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share every layer."""
        return self.groups("tensor")

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same parameters, and the same part of sequences if those are cut."""
        return self.groups("data")

    def pipeline_groups(self) -> list[list[int]]:
        """Stages of one copy, first stage first."""
        return self.groups("pipeline")

    def model_groups(self) -> list[list[int]]:
        """All ranks of one copy."""
        return self.groups("tensor", "pipeline")

    def embedding_groups(self) -> list[list[int]]:
        """First and last stage of each pipeline; the stages between are in none."""
        return [sorted({ranks[0], ranks[-1]}) for ranks in self.pipeline_groups()]

    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold different experts of the same layers."""
        return [
            ranks[start : start + self.expert]
            for ranks in self.groups("context", "data")
            for start in range(0, len(ranks), self.expert)
        ]

    def expert_data_groups(self) -> list[list[int]]:
        """Ranks that hold the same experts."""
        return [
            ranks[start :: self.expert]
            for ranks in self.groups("context", "data")
            for start in range(self.expert)
        ]

    def tensor_expert_groups(self) -> list[list[int]]:
        """Tensor x expert, tensor fastest: the ranks that a token may be sent to."""
        size = self.tensor * self.expert
        return [
            ranks[start : start + size]
            for ranks in self.groups("tensor", "context", "data")
            for start in range(0, len(ranks), size)
        ]

    def model_expert_groups(self) -> list[list[int]]:
        """Tensor x expert x pipeline: one copy of the experts."""
        stages = self.groups("tensor", "context", "data")
        size = self.tensor * self.expert
        return [
            [rank for ranks in stages for rank in ranks[start : start + size]]
            for start in range(0, len(stages[0]), size)
        ]
