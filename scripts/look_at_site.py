"""Look at the site of the documentation in a headless Chromium, and keep three pictures.

    mkdocs build && python scripts/look_at_site.py outputs/site docs/images

Needs tornado, which ipykernel brings, and chromium or chromium-headless-shell.
"""

import asyncio
import base64
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VIEWS = {
    "first": ("index.html", "document.querySelectorAll('.md-tabs__link').length"),
    "key": ("reference/keys.html#optimizer", "document.querySelectorAll('#optimizer ~ * tr').length"),
    "search": ("index.html?q=state_offload", "document.querySelectorAll('.md-search-result__item').length"),
}
"""Name of a picture -> page, and the number of parts that it must have before it is taken."""
_SIZE = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
_SECONDS = 60


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def look(site: Path) -> dict[str, tuple[int, str, bytes]]:
    """Of each view the number of its parts, the text of the page and a picture in PNG.

    Raises:
        FileNotFoundError: there is no browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError(f"none of {', '.join(BROWSERS)} is installed")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [browser, *options, f"--user-data-dir={profile}", "about:blank"], stderr=subprocess.PIPE, text=True
        )
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if "DevTools listening on " in line)
            return asyncio.run(_look(line.split()[-1], f"http://127.0.0.1:{server.server_port}"))
        finally:
            process.kill()
            process.wait()
            server.shutdown()


async def _look(address: str, site: str) -> dict[str, tuple[int, str, bytes]]:
    browser = await websocket_connect(address, max_message_size=2**26)
    target = (await _call(browser, None, "Target.createTarget", url="about:blank"))["targetId"]
    session = (await _call(browser, None, "Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
    call = functools.partial(_call, browser, session)
    await call("Emulation.setDeviceMetricsOverride", **_SIZE)
    views = {}
    for name, (page, parts) in VIEWS.items():
        await call("Page.navigate", url=f"{site}/{page}")
        for _ in range(_SECONDS):
            await asyncio.sleep(1)
            if number := await _value(call, parts):
                break
        await asyncio.sleep(2)  # fades
        picture = await call("Page.captureScreenshot", format="png")
        views[name] = number, await _value(call, "document.body.innerText"), base64.b64decode(picture["data"])
    return views


async def _value(call: Any, expression: str) -> Any:
    return (await call("Runtime.evaluate", expression=expression))["result"].get("value")


async def _call(browser: WebSocketClientConnection, session: str | None, method: str, **parameters: Any) -> dict:
    """The result of a command of the DevTools protocol; events between are left out."""
    message = {"id": 1, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
    await browser.write_message(json.dumps(message))
    while "id" not in (answer := json.loads(await browser.read_message() or "{}")):
        pass
    return answer["result"]


if __name__ == "__main__":
    site, pictures = map(Path, sys.argv[1:])
    for name, (number, _, picture) in look(site).items():
        (pictures / f"site_{name}.png").write_bytes(picture)
        print(f"site_{name}.png: {number} parts, {len(picture):,} bytes")
