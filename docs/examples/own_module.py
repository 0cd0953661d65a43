"""Predict a module of your own, without a GPU: `python docs/examples/own_module.py`.

The module can be any `nn.Module`; build it on the meta device so that no weights are allocated.
"""

import torch
from torch import nn

import perfmodel


class TwoTower(nn.Module):
    """A two-tower recommender: users and items, each an embedding and an MLP, scored by a dot product."""

    def __init__(self, n_users: int = 1_000_000, n_items: int = 200_000, width: int = 256) -> None:
        """Sizes of the two tables and of the layers."""
        super().__init__()
        self.users = nn.EmbeddingBag(n_users, width, mode="sum", sparse=False)
        self.items = nn.EmbeddingBag(n_items, width, mode="sum", sparse=False)
        self.user_mlp = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, width))
        self.item_mlp = nn.Sequential(nn.Linear(width, 1024), nn.ReLU(), nn.Linear(1024, width))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """One score per (user, item) pair; both inputs are (batch, history length) indices."""
        return (self.user_mlp(self.users(users)) * self.item_mlp(self.items(items))).sum(-1)


def main() -> None:
    """Predicts one training step of 8 ranks on a DGX A100 and prints where the time goes."""
    with torch.device("meta"):
        model = TwoTower()
        batch = (torch.zeros(4096, 20, dtype=torch.long), torch.zeros(4096, 5, dtype=torch.long))
    prediction = perfmodel.predict(
        model,
        "dgx_a100",
        "embeddings=data_parallel",
        inputs=batch,
        loss=lambda scores: nn.functional.softplus(-scores).mean(),
        optimizer="adam",
    )
    print(
        f"{prediction.iteration_time_s * 1e3:.2f} ms  ({prediction.low_s * 1e3:.2f} to {prediction.high_s * 1e3:.2f})"
    )
    for op in prediction.top_ops[:5]:
        print(f"{op.share_frac:6.1%}  {op.name} ({op.phase}, {op.source})")
    print(
        f"compute {prediction.breakdown.compute_s:.2e} s, exposed {prediction.breakdown.exposed_communication_s:.2e} s"
    )


if __name__ == "__main__":
    main()
