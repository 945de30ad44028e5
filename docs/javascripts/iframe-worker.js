// The search of a site that is opened from its files. Browsers start no worker from a file, so a
// hidden frame runs its script. mkdocs-material's plugin 'offline' asks for a script of this name.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.scope = frame.contentWindow
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = frame.contentDocument.createElement("script")
      script.src = url
      this.loaded = new Promise((resolve) => script.addEventListener("load", resolve))
      frame.contentDocument.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
