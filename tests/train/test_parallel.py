"""Loss and every parameter's gradient of the parallel forms, against one process, in float64: eight families, sizes
that do not divide (heads, experts, widths, positions), stages without a MoE layer, a tied embedding."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from tests.comm.ranks import on_ranks
from tests.models.conftest import family_config
from tests.train.parallel_forms import EVERY_FAMILY, RANKS, SOME_FAMILIES, Difference, Form, differences, pairwise

MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {},
    "olmoe": {},
    "phimoe": {},
    "gpt_oss": {},
    "deepseek_v2": {},
    "deepseek_v3": {},
    "granitemoeshared": {"tie_word_embeddings": True},
}
IN_ALL_FORMS = ("qwen3_moe", "deepseek_v3", "granitemoeshared")
PAIRWISE = pairwise()
FORMS = {name: (*EVERY_FAMILY, *(SOME_FAMILIES if name in IN_ALL_FORMS else ())) for name in MODELS}


def is_quick(name: str, form: Form) -> bool:
    """In the quick lane a family meets one of the forms for all in turn, and of the other forms those one family that
    it takes to meet every two settings that are met together; the rest meet in the slow one."""
    if form in EVERY_FAMILY:
        return EVERY_FAMILY.index(form) == list(MODELS).index(name) % len(EVERY_FAMILY)
    return form in PAIRWISE and PAIRWISE.index(form) % len(IN_ALL_FORMS) == IN_ALL_FORMS.index(name)


# Models whose forms of one lane share ranks: fewer starts, and none takes too long for one test's timeout.
TOGETHER: list[tuple[str, ...]] = [(name,) for name in IN_ALL_FORMS]
TOGETHER.append(tuple(name for name in MODELS if name not in IN_ALL_FORMS))


CASES = [
    pytest.param(name, form, marks=() if is_quick(name, form) else pytest.mark.slow)
    for name, forms in FORMS.items()
    for form in forms
]
Found = list[dict[Any, Difference]]


@pytest.fixture(scope="module")
def differences_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], bool], Found]:
    """Of these models in the forms of a lane, by rank; ranks are started once for all of them."""

    def found(names: tuple[str, ...], quick: bool) -> Found:
        models = {
            name: (
                {layers: family_config(name, num_hidden_layers=layers, **MODELS[name]).to_dict() for layers in (2, 4)},
                tuple(form for form in FORMS[name] if is_quick(name, form) == quick),
            )
            for name in names
        }
        return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), partial(differences, models))

    return cache(found)


@pytest.mark.parametrize(("model", "form"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_one_process(
    differences_of: Callable[[tuple[str, ...], bool], Found], model: str, form: Form
) -> None:
    all_differences = differences_of(next(names for names in TOGETHER if model in names), is_quick(model, form))
    for of_rank in all_differences:
        off = of_rank[model, form]
        assert off.loss < 1e-10
        assert off.balance < 1e-10
        assert off.norm < 1e-10
        assert off.rows == 0
        assert off.gradient < 1e-10, off.purpose
