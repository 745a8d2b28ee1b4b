"""Tests of what only GPUs do are collected where there are two."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if torch.cuda.device_count() >= 2 else ["test_*.py"]
