"""What the Hub answers when it does not do what it was asked: a retry, or one line that says how to go on.

A request is repeated where that can help: the rate limit (429, after the time that the Hub names), a server's error
(5xx), a connection that was lost. What the user must mend (a token, a name, a conflicting change) is a UserError at
once; what stays broken after the retries is a RunFailure. huggingface_hub repeats parts of an upload by itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from spec_train.errors import RunFailure, UserError

WAITS_S = (1.0, 2.0, 4.0, 8.0)
LONGEST_WAIT_S = 120.0
CONFLICTS = (409, 412)

T = TypeVar("T")


def hub_exceptions() -> tuple[type[Exception], ...]:
    """What huggingface_hub raises: HTTP and connection errors, Xet's PermissionError, and RuntimeError and ValueError
    around parts of an upload."""
    return (*_connection_errors(), PermissionError, RuntimeError, ValueError)


def _connection_errors() -> tuple[type[Exception], ...]:
    """Answers with an error status and lost connections are HTTPError of the HTTP client that huggingface_hub is built
    with; Xet has Python's own, and so has offline mode."""
    from huggingface_hub.errors import HfHubHTTPError

    return (HfHubHTTPError.__bases__[0], ConnectionError, TimeoutError)


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an error, None where no answer came."""
    response = getattr(_root(error), "response", None)
    return None if response is None else int(response.status_code)


def patiently(call: Callable[[], T]) -> T:
    """`call()`, repeated where that can help. Raises the last error."""
    for wait in WAITS_S:
        try:
            return call()
        except hub_exceptions() as error:
            if not pause(error, wait):
                raise
    return call()


def pause(error: Exception, wait: float) -> bool:
    """Wait before another attempt, `wait` seconds or as long as the Hub asks for; False where none is worth it."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = status_of(error)
    expired_link = status == 403 and isinstance(error, RuntimeError)  # a signed upload link; the next is new
    if status is None:
        again = isinstance(_root(error), _connection_errors()) and not isinstance(error, OfflineModeIsEnabled)
    else:
        again = status in (408, 429) or status >= 500 or expired_link
    asked = _retry_after(error)
    if not again or (asked or 0) > LONGEST_WAIT_S:
        return False
    time.sleep(wait if asked is None else asked)
    return True


def explained(error: Exception, repo_id: str, token: str) -> UserError | RunFailure:
    """The error as one line for the user. `token` is cut out of whatever the server says."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    root, status = _root(error), status_of(error)
    if isinstance(root, OfflineModeIsEnabled):
        return UserError("HF_HUB_OFFLINE is set: a push needs the network, unset it (--dry-run works without)")
    # An HTTP error's own text holds the URL, and with it a signed link.
    said = getattr(root, "server_message", None) or ("no reason given" if status else str(root))
    said = " ".join(said.replace(token, "***").split())[:300]
    if status == 401:
        return UserError(
            "the Hub does not accept the token (401): set HF_TOKEN to a valid one, or log in with `hf auth login`"
        )
    if status == 403:
        return UserError(
            f"the token may not write to {repo_id} (403: {said}): use one with write access to {repo_id.split('/')[0]}"
        )
    if status == 404:
        return UserError(f"{repo_id} does not exist on the Hub, or the token cannot see it (404)")
    if status in CONFLICTS:
        return UserError(conflict(repo_id))
    if status == 429:
        asked = _retry_after(error)
        when = "later" if asked is None else f"in {asked:.0f} seconds"
        return RunFailure(f"the Hub limits the rate of requests (429): repeat the command {when}")
    if status is not None and status >= 500:
        return RunFailure(
            f"the Hub fails ({status}), after {len(WAITS_S) + 1} attempts too: repeat the command later, "
            "what is uploaded is not sent again"
        )
    if status is not None or isinstance(root, ValueError):
        return UserError(f"the Hub refuses the push to {repo_id}{f' ({status})' if status else ''}: {said}")
    return RunFailure(
        f"the connection to {constants.ENDPOINT} failed ({type(root).__name__}: {said}): repeat the command, "
        "what is uploaded is not sent again; HF_HUB_DISABLE_XET=1 uploads by plain HTTPS"
    )


def conflict(repo_id: str) -> str:
    """The line for a repository that somebody else changes at the same time."""
    return (
        f"{repo_id} was changed by somebody else during this push, which committed nothing: look at that change, "
        "then repeat the command"
    )


@contextmanager
def explaining(repo_id: str, token: str, left: str = "") -> Iterator[None]:
    """Turn the Hub's errors into lines; `left` says what an earlier step has left behind."""
    try:
        yield
    except (UserError, RunFailure) as error:
        raise type(error)(f"{error}{left}") from None
    except hub_exceptions() as error:
        line = explained(error, repo_id, token)
        raise type(line)(f"{line}{left}") from None


def only_waits_in_log() -> None:
    """Let huggingface_hub's log say that it waits, and not the signed links that it logs beside."""

    def shown(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR or record.getMessage().startswith(("Rate limited.", "Retrying in"))

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(shown)


def _root(error: BaseException) -> BaseException:
    """huggingface_hub wraps errors of parallel uploads in a RuntimeError."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _retry_after(error: Exception) -> float | None:
    """The seconds that the Hub asks to wait, by either of its headers."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    response = getattr(_root(error), "response", None)
    if response is None or response.status_code not in (429, 503):
        return None
    limit = parse_ratelimit_headers(response.headers)
    if limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdigit() else None
