"""Says early whether pages can be written, without the libraries that write them."""

from importlib.util import find_spec

from memwall.errors import UsageError


def require_page_libraries() -> None:
    """Checks that jinja2 and plotly are there, and imports neither.

    Raises:
        UsageError: one of them is not installed.
    """
    for package in ("jinja2", "plotly"):
        if find_spec(package) is None:
            raise UsageError(
                f"the HTML report needs {package}, which is not installed; "
                "install the extra with: pip install 'torch-memwall[report]'"
            )
