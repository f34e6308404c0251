async function start() {
  document.querySelectorAll("header .command").forEach((box) => command.dress(box));
  const data = JSON.parse(await unpack("data"));
  data.blobs.forEach((blob, id) => { blob.id = id; });
  table.start(data);
  if (data.blobs.length) {
    copies.start(data);
    search.start(data);
    map.start(data);
    address.start(map, table);
    window.addEventListener("beforeprint", () => paper.begin());
    window.addEventListener("afterprint", () => paper.end());
  } else {
    document.querySelectorAll(".skip, #map-section, #table").forEach((part) => { part.hidden = true; });
  }
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const notice = element("p", `This browser cannot draw the report: ${error}`, { class: "notice" });
  document.querySelector("main").prepend(notice);
  throw error;
});
