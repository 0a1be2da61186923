// What a search prefers: pages whose title has the words, and for four words or more the messages. How-to pages and
// the reference come before lessons of the same rank, the changelog last.
var ASKED = (new URLSearchParams(location.search).get("q") || "").toLowerCase().match(/[\w.]+/g) || [];
var Scorer = {
  score: ([page, title, anchor, description, score, file]) => {
    const named = ASKED.filter((word) => title.toLowerCase().includes(word)).length / (ASKED.length || 1);
    let place = /^(how-to|reference|start)/.test(page) ? 1 : 0;
    if (/reference.(messages|reports)/.test(page)) place = ASKED.length > 3 ? 12 : ASKED.length > 2 ? 2 : -8;
    if (/changelog/.test(page)) place = -4;
    return score + 8 * named + place;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: {0: 15, 1: 5, 2: -5},
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
