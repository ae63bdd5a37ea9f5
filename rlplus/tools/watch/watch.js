{
  // Every two seconds the cards, and what else has changed; a page that nobody sees asks less often.
  const PAUSE_S = 2, UNSEEN_S = 20;
  const places = { now: "now", curves: "curves", samples: "newest" };
  const link = document.getElementById("link");
  let answered = new Date(), timer = setTimeout(update, 1000 * PAUSE_S);  // null while it asks

  async function get(part) {
    const answer = await fetch(`${part}.json${location.search}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  function put(part, { version, html }) {
    const place = document.getElementById(places[part]);
    if (place.dataset.version === version) return;
    place.innerHTML = html;  // escaped by the server; the page's policy runs no script in it
    place.dataset.version = version;
    if (part === "curves") page.readCharts();
    if (part === "samples") page.pickSamples();
  }
  async function update() {
    timer = null;
    try {
      const now = await get("now");
      put("now", now);
      document.title = now.title;
      for (const [part, version] of Object.entries(now.versions)) {
        if (document.getElementById(places[part]).dataset.version !== version) put(part, await get(part));
      }
      answered = new Date();
      link.hidden = true;
    } catch (error) {
      const time = answered.toTimeString().slice(0, 5);
      link.textContent = `No answer from rlplus watch since ${time}: ${error.message}`;
      link.hidden = false;
    }
    timer = setTimeout(update, 1000 * (document.hidden ? UNSEEN_S : PAUSE_S));
  }
  addEventListener("visibilitychange", () => {
    if (document.hidden || timer === null) return;
    clearTimeout(timer);
    update();
  });
}
