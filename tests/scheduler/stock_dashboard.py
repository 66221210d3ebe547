"""rq-dashboard as it comes, in a process of its own: ours changes its modules.

Prints two ports: of the plain one, and of the one that was told to disable deletion.
"""

from __future__ import annotations

import sys
import threading

from rq_dashboard.cli import make_flask_app
from rq_dashboard.web import setup_rq_connection
from werkzeug.serving import make_server


def serve(redis_url: str, disable_delete: bool) -> int:
    """Start one in a thread; returns its port."""
    app = make_flask_app(None, None, None, "")
    app.config["RQ_DASHBOARD_REDIS_URL"] = redis_url
    app.config["RQ_DASHBOARD_DISABLE_DELETE"] = disable_delete
    setup_rq_connection(app)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_port)


if __name__ == "__main__":
    print(serve(sys.argv[1], False), serve(sys.argv[1], True), flush=True)
    sys.stdin.read()
