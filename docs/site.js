// A button beside each block of code that copies its text.
document.addEventListener("DOMContentLoaded", () => {
  if (!navigator.clipboard) return; // neither a file nor https: browsers refuse
  for (const block of document.querySelectorAll("article .highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.type = "button";
    button.textContent = "copy";
    button.setAttribute("aria-label", "Copy this block");
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(block.querySelector("pre").textContent.trimEnd());
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 2000);
    });
    block.append(button);
  }
});
