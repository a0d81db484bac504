// Lets the search of pages work that are opened as files. It runs in a worker, which
// browsers start for pages of a server only; a frame that is not shown takes its place.
class FrameWorker extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    this.started = new Promise((resolve) => {
      frame.onload = () => resolve(this.start(frame, url));
    });
    document.body.append(frame);
  }

  start(frame, url) {
    const inside = frame.contentWindow;
    inside.postMessage = (data) =>
      this.dispatchEvent(new MessageEvent("message", { data }));
    const script = frame.contentDocument.createElement("script");
    script.src = url;
    return new Promise((resolve) => {
      script.onload = () => resolve(inside);
      frame.contentDocument.body.append(script);
    });
  }

  async postMessage(data) {
    const inside = await this.started;
    inside.dispatchEvent(new MessageEvent("message", { data }));
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker;
