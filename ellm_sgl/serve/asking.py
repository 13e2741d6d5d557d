"""Asks a running server, as commands do that did not start it."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click
import httpx

Command = TypeVar("Command", bound=Callable[..., Any])

TIMEOUT_S = 20.0


class AskError(RuntimeError):
    """The server gives no answer that is of use; the message says why, and the remedy."""


def server_options(command: Command) -> Command:
    """The options --url and --api-key."""
    key = click.option(
        "--api-key",
        envvar="ELLM_SGL_API_KEY",
        metavar="KEY",
        help="The server's --api-key, where it has one; better in ELLM_SGL_API_KEY, where others "
        "of the machine do not see it.",
    )
    url = click.option("--url", default="http://127.0.0.1:30000", help="Of the server.")
    return url(key(command))


def connected(url: str, api_key: str | None) -> httpx.Client:
    """
    Raises:
        AskError: an address or a key that can be none.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        # Proxies are for other hosts; SSL_CERT_FILE and SSL_CERT_DIR count.
        return httpx.Client(
            base_url=url,
            headers=headers,
            timeout=TIMEOUT_S,
            trust_env=False,
            verify=ssl.create_default_context(),
        )
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise AskError(str(error)) from None


def ask(
    client: httpx.Client, path: str, body: dict[str, Any] | None = None, key: str | None = None
) -> Any:
    """The JSON that `path` answers; with a `body`, which is posted there.

    Args:
        key: in place of the client's: SGLang takes its admin key alone for what is protected so.

    Raises:
        AskError: there is none.
    """
    where = str(client.base_url).rstrip("/")
    try:
        method = "GET" if body is None else "POST"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        answer = client.request(method, path, json=body, headers=headers)
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            wanted = "API key; give --api-key"
            if body is not None:
                wanted = "admin key; give --admin-api-key"
            raise AskError(f"{where}{path}: the server wants its {wanted}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise AskError(f"{where}{path}: not there; is eLLM on (--ellm-policy), and as new?")
        return answer.raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        told = str(error) or type(error).__name__
        raise AskError(f"{where}: no answer ({told}); is a server there? give --url") from None


@contextmanager
def of_this_version() -> Iterator[None]:
    """Around whatever reads answers: one of another shape ends in an `AskError`."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise AskError(
            f"the server's answer has another shape ({error!r}); is it an ellm-sgl server, and as "
            "new as this command?"
        ) from None
