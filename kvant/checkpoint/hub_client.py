"""What Kvant asks of the Hugging Face Hub: which commit and files a repository has, and the bytes of one file.

`huggingface_hub` knows the addresses, the token (HF_TOKEN, or `hf auth login`) and the errors. Its own downloads delete what
is half done, so the bytes are read here: an interrupted file goes on where it stopped, in this run or the next. Loaded when
something is really asked for.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvant.errors import DownloadError, KvantError, ModelNotFoundError

CHUNK_BYTES = 1 << 20
TIMEOUT = 20.0  # seconds without a byte
ATTEMPTS = 4  # in a row that bring nothing; one that brings something starts the count anew

LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


class RemoteFile(NamedTuple):
    """One file of a commit. `sha256` for large files; every file has git's own hash of its content."""

    num_bytes: int
    sha256: str | None
    git_hash: str | None


class Repository(NamedTuple):
    """A repository at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]


class HubClient:
    """The Hub at `endpoint`, by default the one that `huggingface_hub` is set to."""

    def __init__(self, endpoint: str | None = None, token: str | None = None):
        self.endpoint = endpoint
        self.token = token

    def repository(self, repo: str, revision: str | None) -> Repository:
        """The commit that `revision` names now. Raises `ModelNotFoundError` and `DownloadError` with the remedy."""
        from huggingface_hub import HfApi

        with _in_words(repo, revision):
            info = HfApi(endpoint=self.endpoint, token=self.token).model_info(repo, revision=revision, files_metadata=True)
        if re.fullmatch(r"[0-9a-f]{7,64}", str(info.sha)) is None:
            raise DownloadError(f"the Hub names no commit of {repo}; try again later")
        files = {file.rfilename: _remote_file(file) for file in info.siblings or () if file.size is not None}
        return Repository(str(info.sha), files)

    def fetch(self, repo: str, commit: str, name: str, target: Path, tick: Callable[[int], None]) -> None:
        """Appends to `target` what is missing of the file; `tick(bytes)` is called with what is there."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.utils import build_hf_headers

        url = hf_hub_url(repo, name, revision=commit, endpoint=self.endpoint)
        headers = {**build_hf_headers(token=self.token), "Accept-Encoding": "identity"}
        target.parent.mkdir(parents=True, exist_ok=True)
        with _in_words(repo, commit), open(target, "ab") as file:
            left = ATTEMPTS
            while True:
                before = file.tell()
                try:
                    return _append(url, headers, file, tick)
                except HfHubHTTPError:
                    raise
                except HTTPError:  # the line broke: go on from here
                    left = ATTEMPTS if file.tell() > before else left - 1
                    if left == 0:
                        raise

    def cached(self, repo: str, commit: str, name: str) -> Path | None:
        """The file in the cache that other programs share, if one of them has fetched it."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repo, name, revision=commit)
        return Path(found).resolve() if isinstance(found, str) else None


def _append(url: str, headers: dict[str, str], file: IO[bytes], tick: Callable[[int], None]) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.utils import hf_raise_for_status

    start = file.tell()
    if start:
        headers = {**headers, "Range": f"bytes={start}-"}
    with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as response:
        if response.status_code == 416:  # nothing is missing
            return
        hf_raise_for_status(response)
        if start and response.status_code != 206:  # this server only gives whole files
            file.truncate(0)
        for chunk in response.iter_bytes():  # as they come: a chunk that is waited for is lost when the line breaks
            file.write(chunk)
            tick(file.tell())


def is_intact(path: Path, file: RemoteFile) -> bool:
    """Whether `path` holds exactly the bytes of `file`."""
    if path.stat().st_size != file.num_bytes:
        return False
    wanted, digest = file.sha256, hashlib.sha256()
    if wanted is None:
        wanted, digest = file.git_hash, hashlib.sha1(f"blob {file.num_bytes}\0".encode(), usedforsecurity=False)
    with open(path, "rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
    return wanted is None or digest.hexdigest() == wanted


def _remote_file(file: Any) -> RemoteFile:
    return RemoteFile(file.size, file.lfs.sha256 if file.lfs else None, None if file.lfs else file.blob_id)


@contextmanager
def _in_words(repo: str, revision: str | None) -> Iterator[None]:
    """Errors of the Hub and the network as errors of Kvant."""
    from huggingface_hub import errors

    page = f"https://huggingface.co/{repo}"
    try:
        yield
    except KvantError:
        raise
    except errors.GatedRepoError as error:
        raise DownloadError(f"{repo} is gated: accept its terms at {page}, then {LOG_IN} ({_status(error)})") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no file or folder {repo}, and no repository of that name that you may see at {page};"
            f" if it is private, {LOG_IN} ({_status(error)})"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelNotFoundError(f"{repo} has no revision {revision!r}; its revisions are listed at {page}") from error
    except errors.HfHubHTTPError as error:
        status = _status(error)
        remedy = f"; the token is not accepted: {LOG_IN}" if status in ("HTTP 401", "HTTP 403") else "; try again later"
        raise DownloadError(f"the Hub answers {status} for {repo}{remedy}") from error
    except errors.HFValidationError as error:
        raise ModelNotFoundError(f"{repo!r} is no name of a repository: {error}") from error
    except (errors.HTTPError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        raise DownloadError(
            f"cannot reach the Hub for {repo}: {error or type(error).__name__}; check the network, then run the same command"
            " again: it goes on where it stopped"
        ) from error


def _status(error: Any) -> str:
    return f"HTTP {error.response.status_code}"
