"""Names of dtypes, as people write them."""

import pytest

from memwall.errors import UsageError
from memwall.integrations.dtypes import parse_dtype


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("float32", "fp32", "float", "f32", "FP32", "torch.float32"), "float32"),
        (("bfloat16", "bf16", "BF16", "torch.bfloat16"), "bfloat16"),
        (("float16", "fp16", "half", "f16", "torch.half"), "float16"),
    ],
)
def test_a_dtype_has_several_names(names: tuple[str, ...], expected: str) -> None:
    assert {parse_dtype(name, option="--dtype") for name in names} == {expected}


@pytest.mark.parametrize("name", ["int8", "", "float64", "bfloat", "torch."])
def test_what_is_no_dtype_of_weights_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^--dtype: '{name}' is not known; expected one of float32, bfloat"):
        parse_dtype(name, option="--dtype")


def test_some_options_take_only_some_of_them() -> None:
    with pytest.raises(UsageError, match=r"^--autocast: 'fp32' is not known; expected one of bfloat16, float16$"):
        parse_dtype("fp32", option="--autocast", among=("bfloat16", "float16"))
