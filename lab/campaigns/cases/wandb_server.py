"""A local server for the real W&B client, which can fail in the ways real servers do."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class WandbServer:
    """Implements the subset of the API needed by a run and a dashboard.

    `answer_with` is the status code of all responses, or `stall`: no response. It keeps the history rows by run id, in
    line order, and the variables of each UpsertBucket mutation (`started`), saved view and custom chart.
    """

    def __init__(self) -> None:
        self.answer_with: int | str = 200
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}
        self.started: list[dict[str, Any]] = []
        self.views: list[dict[str, Any]] = []
        self.charts: list[dict[str, Any]] = []
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self) -> WandbServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path) -> dict[str, str]:
        """Of a client with an account here and without the user's W&B configuration."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": "0" * 40,
            "NETRC": str(home / "netrc"),
            "HOME": str(home),
            "WANDB_CONFIG_DIR": str(home / "config"),
            "WANDB_CACHE_DIR": str(home / "cache"),
            "WANDB_ERROR_REPORTING": "false",
        }

    def rows(self, run_id: str) -> list[dict[str, Any]]:
        lines = self.runs.get(run_id, {})
        return [lines[offset] for offset in sorted(lines)]

    def respond(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl", {})
            lines = self.runs.setdefault(path.split("/")[-2], {})
            for index, line in enumerate(history.get("content", [])):
                lines[history["offset"] + index] = json.loads(line)
            return {}
        if path != "/graphql":
            return {}
        request = json.loads(body)
        return {"data": self._data(request["query"], request.get("variables") or {})}

    def _data(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "RunResumeStatus" in query:
            lines = self.rows(variables["name"])
            tail = json.dumps([json.dumps(line) for line in lines[-1:]])
            bucket = {"id": "x", "name": variables["name"], "tags": [], "wandbConfig": '{"t": 1}', "eventsTail": "[]"}
            bucket |= {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0, "historyTail": tail}
            bucket |= {"config": "{}", "summaryMetrics": "{}"}
            return {"model": {"id": "1", "name": "p", "entity": {"id": "2", "name": "me"}, "bucket": bucket}}
        if "upsertBucket" in query:
            self.started.append(variables)
            project = {"id": "1", "name": "p", "entity": {"id": "2", "name": "me"}}
            bucket = {"id": "x", "name": variables.get("name"), "displayName": "d", "project": project}
            return {"upsertBucket": {"bucket": {**bucket, "historyLineCount": 0}, "inserted": True}}
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        if "upsertView" in query:
            self.views.append(variables)
            return {"upsertView": {"view": {"id": "v", "name": variables.get("name")}, "inserted": True}}
        if "createCustomChart" in query:
            self.charts.append(variables)
            return {"createCustomChart": {"chart": {"id": f"{variables.get('entity')}/{variables.get('name')}"}}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        return {}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


def _handler(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            pass

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            while server.answer_with == "stall":
                time.sleep(0.1)
            status = int(server.answer_with)
            failed = {"errors": [{"message": "so the server says"}]}
            answer = json.dumps(failed if status >= 400 else server.respond(self.path, body)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_PUT = do_POST

    return Handler
