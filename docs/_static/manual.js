// A page that was opened as a file may not read others, so search shows titles without excerpts there.
if (location.protocol === "file:") {
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
}
