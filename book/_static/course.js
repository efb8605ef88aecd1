// Boxes that scroll sideways must be reachable from the keyboard.
function makeScrollable() {
  document.querySelectorAll(".bd-article pre, .bd-article table, .bd-article mjx-container[display='true'], .bd-article div.output")
    .forEach((box) => {
      if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
      else if (box.tabIndex === 0) box.removeAttribute("tabindex");
    });
}
function repairRoles() {
  // what is written on a button is its name: people who speak to their computer say what they see
  document.querySelectorAll(".search-button-field, details > summary[aria-label]").forEach((button) => button.removeAttribute("aria-label"));
  // bibliography entries sit in a "list" without list items
  document.querySelectorAll(".citation-list").forEach((list) => list.removeAttribute("role"));
}
window.addEventListener("load", makeScrollable);
window.addEventListener("load", repairRoles);
window.addEventListener("resize", makeScrollable);
