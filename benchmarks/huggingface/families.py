"""What patterns cannot know: options of some families of models, by `model_type`."""

from __future__ import annotations

from typing import Any

OPTIONS: dict[str, dict[str, Any]] = {}
