from embeddings.common import ContrastiveStep


def test_a_class_with_the_two_functions_is_a_step():
    class Step:
        def embed(self, tokens, context=None): ...

        def loss_from_representations(self, query, candidate, batch): ...

    assert isinstance(Step(), ContrastiveStep)
    assert not isinstance(object(), ContrastiveStep)
