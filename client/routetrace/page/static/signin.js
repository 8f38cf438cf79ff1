// Signing in with a token, where the server asks for one.

import { send, Trouble } from "./api.js";
import { plain } from "./text.js";
import { h, message, put } from "./ui.js";

/**
 * The view that asks for a token. `words` says why; `given` is the run of the address, if it names
 * one; done() is called when a token is accepted.
 */
export function signIn(words, given, done) {
  const field = h("input", {
    type: "password", class: "mono grow", autocomplete: "off", spellcheck: "false",
    required: true, "aria-describedby": "refused",
  });
  const run = h("input", {
    type: "text", class: "mono grow", autocomplete: "off", spellcheck: "false", value: given ?? "",
  });
  const runField = h("label", { class: "field" }, "Run of the token", run);
  runField.hidden = !given;
  const refused = h("p", { id: "refused", class: "bad", role: "alert" });
  const button = h("button", { type: "submit", class: "main" }, "Sign in");
  const form = h("form", { class: "bar open", onsubmit: submit },
    h("label", { class: "field" }, "Token", field), runField, button);

  async function submit(event) {
    event.preventDefault();
    const token = field.value.trim();
    if (!token) return;
    button.disabled = true;
    put(refused, "");
    try {
      await send("POST", "session", run.value ? { token, run: run.value } : { token });
      field.value = "";
      done();
    } catch (error) {
      if (!(error instanceof Trouble)) throw error;
      put(refused, error.status === 401 ? "This token is not valid." : plain(error.message));
      // A token that covers some runs alone: name one of them.
      if (error.status === 403) runField.hidden = false;
      (error.status === 403 ? run : field).select();
    } finally {
      button.disabled = false;
    }
  }
  const element = h("div", { class: "view narrow" }, message("Sign in",
    words ?? "This server asks for a token: the one of a client, as in ROUTETRACE_TOKEN.",
    form, refused, h("p", { class: "muted" },
      "The page keeps it in its own memory until you sign out, for 12 hours at most.")));
  return { element, title: "Sign in", keys: [], stop() {}, focus: () => field.focus() };
}
