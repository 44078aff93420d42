// Requests to this server. A 401 asks for the key; it is kept in this tab's session storage.

const KEY = "phloem-key";
let asking = null;

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the server answered ${status}`);
    this.status = status;
  }
}

export async function request(path, { method = "GET", body, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key ? { authorization: `Bearer ${key}` } : {};
    if (body !== undefined) headers["content-type"] = "application/json";
    const response = await fetch(path, {
      method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.ok) return response;
    const error = new ApiError(response.status, await response.json().catch(() => null));
    if (response.status !== 401 || !(await askForKey(key))) throw error;
  }
}

export async function get(path) {
  return (await request(path)).json();
}

// One dialog for all requests that wait. True if there is another key than `old` now.
function askForKey(old) {
  if (sessionStorage.getItem(KEY) !== old) return true;
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("key-dialog");
    const field = document.getElementById("key");
    field.value = "";
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const given = dialog.returnValue === "ok" && field.value.trim();
      if (given) sessionStorage.setItem(KEY, given);
      resolve(Boolean(given));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

// The lines of a response as they come.
export async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const pieces = (rest + value).split("\n");
      rest = pieces.pop();
      yield* pieces;
    }
    if (rest) yield rest;
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The values of a stream of server-sent events, up to [DONE].
export async function* events(response) {
  for await (const line of lines(response)) {
    if (!line.startsWith("data: ")) continue;
    const data = line.slice(6);
    if (data === "[DONE]") return;
    yield JSON.parse(data);
  }
}
