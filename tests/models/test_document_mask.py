"""Documents of a packed row that do not see each other, on every architecture that the masks differ by."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    MistralConfig,
    MistralModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.trainer_utils import set_seed

from embeddings.common import OptionError
from embeddings.models.language_model import check_separation, document_inputs, window

SIZES = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DOCUMENT_NL = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1]])


def model(kind: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    set_seed(0)
    options = {**SIZES, "intermediate_size": 64, "attn_implementation": attention}
    if kind == "bert":
        return BertModel(BertConfig(**options)).eval().to(dtype)
    if kind == "roberta":
        # Positions begin after the padding's.
        return XLMRobertaModel(XLMRobertaConfig(**options, pad_token_id=1)).eval().to(dtype)
    config = MistralConfig(**options, num_key_value_heads=2, sliding_window=None)
    if kind == "bidirectional":
        config.is_causal = False
    return MistralModel(config).eval().to(dtype)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["causal", "bidirectional", "bert", "roberta"])
def test_each_document_is_read_as_if_it_were_alone(kind: str, attention: str) -> None:
    backbone = model(kind, attention)
    ids_NL = torch.randint(3, 200, DOCUMENT_NL.shape)
    with torch.no_grad():
        inputs = document_inputs(backbone, DOCUMENT_NL, kind == "causal")
        packed_NLH = backbone(input_ids=ids_NL, **inputs).last_hidden_state
        together_NLH = backbone(input_ids=ids_NL).last_hidden_state
        for row, document in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
            own_L = DOCUMENT_NL[row] == document
            alone_LH = backbone(input_ids=ids_NL[row][own_L][None]).last_hidden_state[0]
            torch.testing.assert_close(packed_NLH[row][own_L], alone_LH, rtol=1e-4, atol=1e-5)
            # The comparison sees something: in one text the states are others, but for a causal row's first document.
            if (kind, document) != ("causal", 0):
                assert (together_NLH[row][own_L] - alone_LH).abs().max() > 1e-3
    assert torch.isfinite(packed_NLH).all()
    check_separation(backbone, kind == "causal")


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
def test_another_document_changes_nothing(kind: str) -> None:
    backbone = model(kind)
    ids_NL = torch.randint(3, 200, DOCUMENT_NL.shape)
    changed_NL = torch.where(DOCUMENT_NL == 0, (ids_NL + 7) % 200, ids_NL)
    with torch.no_grad():
        inputs = document_inputs(backbone, DOCUMENT_NL, kind == "causal")
        one, other = (backbone(input_ids=ids, **inputs).last_hidden_state for ids in (ids_NL, changed_NL))
    assert torch.equal(one[DOCUMENT_NL > 0], other[DOCUMENT_NL > 0])
    assert not torch.equal(one[DOCUMENT_NL == 0], other[DOCUMENT_NL == 0])


def test_a_model_that_takes_no_such_mask_is_refused() -> None:
    backbone = model("causal")
    backbone.config._attn_implementation = "flash_attention_2"
    with pytest.raises(OptionError, match=r"model\.separate_documents cannot take effect"):
        check_separation(backbone, True)


def test_a_model_whose_documents_see_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from embeddings.models import language_model

    def open_to_all(backbone: PreTrainedModel, document_NL: torch.Tensor, causal: bool) -> dict[str, torch.Tensor]:
        inputs = document_inputs(backbone, document_NL, causal)
        return {**inputs, "attention_mask": torch.ones_like(inputs["attention_mask"])}

    monkeypatch.setattr(language_model, "document_inputs", open_to_all)
    with pytest.raises(OptionError, match="does not keep documents apart"):
        check_separation(model("bidirectional"), False)


def test_a_window_is_the_shortest_that_is_in_use() -> None:
    assert window(MistralConfig(sliding_window=None)) is None
    assert window(MistralConfig(sliding_window=64)) == 64
    assert window(BertConfig()) is None
    unused = MistralConfig(sliding_window=64)
    unused.use_sliding_window = False
    assert window(unused) is None
