"""The metrics of a server."""

from __future__ import annotations

from types import SimpleNamespace

from prometheus_client import generate_latest

from everybert.serving.metrics import Metrics


def test_requests_by_path_and_status_but_unknown_paths_share_a_label():
    metrics = Metrics()
    for path, status in (("/embed", 200), ("/embed", 500), (None, 404), (None, 429)):
        scope = {"route": SimpleNamespace(path=path)} if path else {"path": "/of-the-client"}
        metrics.answered(scope, status, 0.1)
    text = generate_latest(metrics.registry).decode()
    for line in ('path="/embed",status="200"', 'path="unknown",status="404"', 'path="refused",status="429"'):
        assert f"everybert_requests_total{{{line}}} 1.0" in text
    assert "everybert_failures_total 1.0" in text and "of-the-client" not in text
