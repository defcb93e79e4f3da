"""Program that writes the text of a PDF on stdin as JSON, within the `ReadLimits` of its argument.

It imports no jaxlm, to start fast.
"""

import io
import json
import resource
import sys
from typing import Any

from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError, LimitReachedError


def text_of(data: bytes, limits: dict[str, int]) -> dict[str, Any]:
    """Return text, title and number of pages; LimitReachedError if there is too much of either."""
    reader = PdfReader(io.BytesIO(data))
    # A PDF with an owner's password only opens with an empty one.
    if reader.is_encrypted and not reader.decrypt(""):
        raise FileNotDecryptedError("it needs a password")
    count = len(reader.pages)
    if count > limits["pdf_pages"]:
        raise LimitReachedError(f"{count:,} pages")
    pages, size = [], 0
    for page in reader.pages:
        pages.append(page.extract_text().strip())
        size += len(pages[-1])
        if size > limits["document_bytes"]:
            raise LimitReachedError(f"more than {limits['document_bytes']:,} characters")
    title = reader.metadata.title if reader.metadata else None
    return {"text": "\n\n".join(filter(None, pages)), "title": str(title or ""), "pages": count}


def answer(data: bytes, limits: dict[str, int]) -> dict[str, Any]:
    """Return the text, or the kind and detail of a failure."""
    try:
        return text_of(data, limits)
    except LimitReachedError as error:
        return {"kind": "too large", "detail": str(error)}
    except MemoryError:
        detail = f"it takes more than {limits['pdf_memory']:,} bytes to read"
        return {"kind": "too large", "detail": detail}
    except (FileNotDecryptedError, DependencyError) as error:
        return {"kind": "encrypted", "detail": str(error)[:200]}
    except Exception as error:  # pypdf's errors for damage have no common base
        return {"kind": "damaged", "detail": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    limits = json.loads(sys.argv[1])
    # The system ends the process at the CPU limit.
    resource.setrlimit(resource.RLIMIT_CPU, (limits["pdf_seconds"], limits["pdf_seconds"] + 5))
    resource.setrlimit(resource.RLIMIT_AS, (limits["pdf_memory"], limits["pdf_memory"]))
    print(json.dumps(answer(sys.stdin.buffer.read(), limits)))
