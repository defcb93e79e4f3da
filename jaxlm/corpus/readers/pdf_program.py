"""A program of its own: the text of the PDF on its stdin, as JSON on its stdout. It imports nothing of ours, to start fast."""

import io
import json
import resource
import sys
from typing import Any

from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError, LimitReachedError


class TooLarge(Exception):
    """More pages or text than may be."""


def text_of(data: bytes, limits: dict[str, int]) -> dict[str, Any]:
    """The text, the title and the number of pages.

    Raises:
      TooLarge: where there are more pages or characters than the limits allow.
    """
    reader = PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(
        ""
    ):  # an owner's password keeps nobody from reading
        raise FileNotDecryptedError("it asks for a password")
    count = len(reader.pages)
    if count > limits["pages"]:
        raise TooLarge(f"{count:,} pages")
    pages, size = [], 0
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        size += len(pages[-1])
        if size > limits["characters"]:
            raise TooLarge(f"more than {limits['characters']:,} characters")
    title = reader.metadata.title if reader.metadata else None
    return {"text": "\n\n".join(filter(None, pages)), "title": str(title or ""), "pages": count}


def answer(data: bytes, limits: dict[str, int]) -> dict[str, Any]:
    """What there is, or the kind of trouble and its detail."""
    try:
        return text_of(data, limits)
    except (TooLarge, LimitReachedError) as error:
        return {"kind": "too large", "detail": str(error)}
    except MemoryError:
        return {
            "kind": "too large",
            "detail": f"it takes more than {limits['memory']:,} bytes to read",
        }
    except (FileNotDecryptedError, DependencyError) as error:
        return {"kind": "encrypted", "detail": str(error)[:200]}
    except Exception as error:  # what pypdf raises for damage shares no parent
        return {"kind": "damaged", "detail": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    # At the end of its seconds the system ends the process, whatever it does.
    resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"] + 5))
    resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
    print(json.dumps(answer(sys.stdin.buffer.read(), given)))
