"""From a trace to a plan. The package itself is callable: `memwall.plan(trace, budget="10GiB")`.

`memwall.plan` is a public verb and also this package, and an import of any module below sets the attribute `plan` of
`memwall` to the package. Being callable, it means the same whichever came first.
"""

import sys
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """A package whose call is `memwall.plan.search.plan`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from memwall.plan.search import plan

        return plan(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
