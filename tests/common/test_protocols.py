from embeddings.common import ContextualStep, ContrastiveStep


def test_a_class_with_the_two_functions_is_a_step():
    class Step:
        def embed(self, tokens, context=None): ...

        def loss_from_representations(self, query, candidate, batch): ...

    assert isinstance(Step(), ContrastiveStep)
    assert not isinstance(object(), ContrastiveStep)


def test_a_step_that_embeds_a_context_too_has_two_stages():
    class Step:
        def embed(self, tokens, context=None): ...

        def loss_from_representations(self, query, candidate, batch): ...

    class Contextual(Step):
        def embed_context(self, tokens): ...

    assert isinstance(Contextual(), ContextualStep)
    assert isinstance(Contextual(), ContrastiveStep)
    assert not isinstance(Step(), ContextualStep)
