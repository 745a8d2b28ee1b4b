"""The document says what the table says."""

from __future__ import annotations

import os

from .document import FILE, text


def test_document_is_up_to_date() -> None:
    if os.environ.get("CONTRACT") == "document":
        FILE.write_text(text())
    assert FILE.read_text() == text(), "write it anew: CONTRACT=document pytest tests/contract/test_document.py"
