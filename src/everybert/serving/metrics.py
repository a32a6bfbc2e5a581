"""Prometheus metrics of one server process, and its access log."""

import json
import logging
from collections.abc import MutableMapping
from datetime import datetime
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


class Metrics:
    """Counters, gauges and histograms, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.access_log = False
        """Whether each request is a line of JSON on standard error."""

        def make(kind: Any, name: str, what: str, labels: tuple[str, ...] = (), **more: Any) -> Any:
            return kind(f"everybert_{name}", what, labels, registry=self.registry, **more)

        self.requests = make(Counter, "requests", "Requests answered.", ("path", "status"))
        self.seconds = make(Histogram, "request_seconds", "Time to answer a request.", ("path",), buckets=SECONDS)
        self.in_flight = make(Gauge, "in_flight", "Requests accepted and not answered yet.")
        self.waiting = make(Gauge, "waiting_tokens", "Tokens in the queue.")
        self.tokens = make(Counter, "tokens", "Tokens computed.", ("model",))
        self.batch_tokens = make(Histogram, "batch_tokens", "Tokens per batch.", buckets=TOKENS)
        self.batch_seconds = make(Histogram, "batch_seconds", "Time per batch.", buckets=SECONDS)
        self.failures = make(Counter, "failures", "Requests that failed with status 500.")

    def answered(self, scope: MutableMapping[str, Any], status: int, seconds: float) -> None:
        """Count a request. Unknown paths share one label, so that clients cannot create labels without limit."""
        route = scope.get("route")
        path = getattr(route, "path", None) or ("refused" if status in (401, 408, 413, 415, 429, 499) else "unknown")
        self.requests.labels(path, str(status)).inc()
        self.seconds.labels(path).observe(seconds)
        if status == 500:
            self.failures.inc()
        if self.access_log:
            line = {"time": datetime.now().astimezone().isoformat(), "client": (scope.get("client") or ("",))[0]}
            line |= {"method": scope["method"], "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
            logging.getLogger("everybert.access").warning(json.dumps(line))  # to standard error, which may be full
