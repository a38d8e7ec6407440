"""The sparse MLP that stands where a dense one stood: router, then experts, over real tokens alone.

This file travels inside model directories: it imports nothing but torch and the siblings that travel with it.
"""

from torch import Tensor, nn

from .experts import Experts
from .moe_router import Router, RoutingSums


class MoeMlp(nn.Module):
    """Routes each token to its experts and adds their outputs up; padding is neither routed nor counted.

    Args:
        router: Chooses and weighs experts.
        experts: The experts.

    Related: `embeddings.models.upcycling`, which makes one of a dense MLP.
    """

    def __init__(self, router: Router, experts: Experts) -> None:
        super().__init__()
        self.router = router
        self.experts = experts

    def forward(self, state_NLH: Tensor, row_T: Tensor | None = None) -> tuple[Tensor, RoutingSums]:
        """The layer's output and what its routing adds up to.

        Args:
            state_NLH: States, (N, L, H) float.
            row_T: Rows of the flattened states that are tokens, (T,) int64; None where all are.

        Returns:
            Output, (N, L, H), zero at padding; sums over the T tokens.
        """
        state_RH = state_NLH.flatten(0, 1)
        token_TH = state_RH if row_T is None else state_RH.index_select(0, row_T)
        routing = self.router(token_TH)
        output_TH = self.experts(token_TH, routing)
        if row_T is not None:
            output_TH = output_TH.new_zeros(state_RH.shape).index_copy(0, row_T, output_TH)
        return output_TH.view(state_NLH.shape), routing.sums
