// What a search prefers: pages whose title has the words, and the messages for four words or more, or for three with
// a name such as all_reduce. Reference and how-to pages come before lessons of the same rank, the changelog last.
var ASKED = (new URLSearchParams(location.search).get("q") || "").toLowerCase().match(/[\w.]+/g) || [];
var WORDS = ASKED.filter((word) => word.length > 2);
var QUOTED = ASKED.length > 3 || (ASKED.length > 2 && ASKED.some((word) => word.includes("_"))); // as from a message
var Scorer = {
  score: ([page, title, anchor, description, score, file]) => {
    const named = WORDS.filter((word) => title.toLowerCase().includes(word)).length / (WORDS.length || 1);
    let place = /^reference/.test(page) ? 2 : /^(how-to|start)/.test(page) ? 1 : 0;
    if (/reference.(messages|reports)/.test(page)) place = QUOTED ? 12 : ASKED.length > 2 ? 2 : -8;
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
