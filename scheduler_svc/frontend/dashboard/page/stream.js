// The events of /dashboard/events. EventSource cannot send an API key, so the stream is read by hand.

const STORED = "gilir-api-key";
const AGAIN_MS = 1500;

export const key = () => sessionStorage.getItem(STORED) ?? "";
export const setKey = (value) => sessionStorage.setItem(STORED, value);
export const headers = () => (key() ? { authorization: `Bearer ${key()}` } : {});

// Calls back with (event, data); `onState` with "live", "wait", "key" or "refused", and a text. Goes on for ever.
export async function listen(onEvent, onState) {
  for (;;) {
    try {
      const answer = await fetch("/dashboard/events", { headers: headers(), cache: "no-store" });
      if (answer.ok) {
        onState("live", "live");
        await read(answer.body, onEvent);
        onState("wait", "connection ended");
      } else {
        const { error } = await answer.json();
        if (answer.status === 401) {
          onState("key", error.message);
          await new Promise((resolve) => addEventListener("gilir-key", resolve, { once: true }));
          continue;
        }
        onState(answer.status === 403 ? "refused" : "wait", error.message);
      }
    } catch {
      onState("wait", "no connection");
    }
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

async function read(body, onEvent) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    pending += value;
    const events = pending.split("\n\n");
    pending = events.pop();
    for (const text of events) {
      const [kind, data] = text.split("\n");
      if (kind.startsWith("event: ")) onEvent(kind.slice(7), JSON.parse(data.slice(6)));
    }
  }
}
