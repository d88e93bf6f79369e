"""A stand-in for a server: `python streaming_server.py --host H --port P`; ready after a second.

`GET /pid` says which process answers, `GET /hung` how many clients hung up before their answer's end; `POST` with
`{"n": 20}` streams that many events, one every 50 ms, or with `"when": "asked"` the next one at each `GET /next`.
SIGTERM ends it once its answers have ended.
"""

import argparse
import http.server
import json
import os
import signal
import threading
import time

BEGAN = time.monotonic()
HUNG: list[str] = []
ANSWERS: list[threading.Thread] = []
NEXT = threading.Semaphore(0)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def say(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/next":
            NEXT.release()
        said = {"/pid": str(os.getpid()), "/hung": str(len(HUNG)), "/key": self.headers.get("Authorization", "none")}
        code = 503 if self.path == "/ready" and time.monotonic() < BEGAN + 1 else 200
        self.say(code, said.get(self.path.partition("?")[0], self.path))

    def do_POST(self) -> None:
        ANSWERS.append(threading.current_thread())
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for number in range(asked["n"]):
                piece = f"data: {number} {asked.get('text', '')}\n\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.flush()
                if asked.get("when") == "asked":
                    NEXT.acquire()
                else:
                    time.sleep(0.05)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            HUNG.append(self.path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    asked = parser.parse_args()
    server = http.server.ThreadingHTTPServer((asked.host, asked.port), Handler)
    server.daemon_threads = True
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()
    for answer in ANSWERS:
        answer.join(30)


if __name__ == "__main__":
    main()
