'use strict';
// The page shows what the agent's JSON says. Names, annotations and rules can be what a pod's author wrote: they reach the
// document as text nodes only.

const $ = id => document.getElementById(id);

/** element makes an element with attributes and children; strings become text nodes. */
function element(name, attributes = {}, ...children) {
  const e = name in {svg: 1, g: 1, rect: 1, path: 1, text: 1, title: 1} && attributes.svg !== false
    ? document.createElementNS('http://www.w3.org/2000/svg', name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key !== 'svg' && value !== undefined && value !== '') e.setAttribute(key, value);
  }
  e.append(...children.filter(c => c !== undefined && c !== ''));
  return e;
}

/** get reads JSON; an answer that is no success is an error with the server's text. */
async function get(path) {
  const answer = await fetch(path, {headers: {Accept: 'application/json'}});
  if (!answer.ok && path !== 'readyz') throw new Error((await answer.text()).slice(0, 2000) || answer.statusText);
  return answer.json();
}

function fail(error) {
  $('failure').textContent = error ? `The agent does not answer: ${error.message}` : '';
  $('failure').hidden = !error;
}

const tone = state => ({captured: 'good', 'not-inspected': 'warn', 'ipv6-open': 'warn', outside: ''})[state] ?? 'bad';

/** ago is a time as people say it. */
function ago(text) {
  const seconds = (Date.now() - Date.parse(text)) / 1000;
  if (!(seconds < 1e9)) return '-';
  for (const [unit, size] of [['d', 86400], ['h', 3600], ['min', 60]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return `${Math.max(0, Math.floor(seconds))} s`;
}

const shown = 500; // rows of a table
let pods = [];
let chosen = '';

function showPods() {
  const search = $('search').value.toLowerCase();
  const some = pods.filter(p => `${p.namespace}/${p.pod}`.toLowerCase().includes(search) && !($('faulty').checked && p.state === 'captured'));
  const counts = new Map();
  for (const p of pods) counts.set(p.state, (counts.get(p.state) ?? 0) + 1);
  $('states').replaceChildren(...[...counts].map(([state, n]) => element('li', {class: tone(state)}, `${state}: ${n}`)));
  $('pods').replaceChildren(...some.slice(0, shown).map(p => {
    const key = `${p.namespace}/${p.pod}`;
    const row = element('tr', {class: 'pod', tabindex: 0, 'aria-selected': key === chosen},
      element('td', {}, key), element('td', {class: tone(p.state)}, p.state), element('td', {title: p.since}, ago(p.since)),
      element('td', {title: p.checked}, ago(p.checked)), element('td', {}, p.backend ?? ''), element('td', {}, p.problems?.[0]?.detail ?? p.sentence ?? ''));
    const open = () => { location.hash = encodeURIComponent(key); };
    row.addEventListener('click', open);
    row.addEventListener('keydown', e => { if (e.key === 'Enter') open(); });
    return row;
  }));
  $('more').hidden = some.length <= shown;
  $('more').textContent = `${some.length - shown} more: search for a name`;
}

/** drawPath draws hooks, proxy and application; a wire is red where a problem of the state concerns it. */
function drawPath(p) {
  const states = new Set((p.problems ?? []).map(x => x.state));
  const rulesBad = ['bypassed', 'drifted', 'foreign-rule'].some(s => states.has(s));
  const deaf = port => (p.problems ?? []).some(x => x.state === 'no-listener' && x.detail.includes(`:${port}`));
  const box = (x, y, w, label, note, bad) => element('g', {},
    element('rect', {class: 'box', x, y, width: w, height: 46, rx: 6}),
    element('text', {x: x + w / 2, y: y + 20, 'text-anchor': 'middle', class: bad ? 'bad' : ''}, label),
    element('text', {x: x + w / 2, y: y + 37, 'text-anchor': 'middle', class: `small${bad ? ' bad' : ''}`}, note));
  const wire = (d, bad) => element('path', {d, class: `wire${bad ? ' bad' : ''}`});
  const rules = hook => (p.chains ?? []).filter(c => c.hook === hook).reduce((n, c) => n + c.rules.length, 0);
  const out = p.ports?.outbound ?? 15001;
  const inside = p.ports?.inbound ?? 15006;
  $('path').replaceChildren(element('svg', {viewBox: '0 0 900 190', role: 'img', 'aria-label': 'packet path'},
    wire('M130 53 H210', rulesBad), wire('M370 53 H450', rulesBad || deaf(inside)), wire('M610 53 H740', deaf(inside)),
    wire('M740 143 H610', rulesBad || deaf(out)), wire('M450 143 H370', deaf(out)), wire('M210 143 H130', deaf(out)),
    states.has('bypassed') ? wire('M130 62 C300 105 600 105 740 62', true) : '',
    box(10, 30, 120, 'network', 'inbound'), box(210, 30, 160, 'PREROUTING', `${rules('prerouting')} rules`, rulesBad),
    box(450, 30, 160, `proxy :${inside}`, 'inbound listener', deaf(inside)), box(740, 30, 150, 'application', p.pod),
    box(740, 120, 150, 'application', 'outbound', states.has('uid-collision')), box(450, 120, 160, `OUTPUT → proxy :${out}`, `${rules('output')} rules`, rulesBad || deaf(out)),
    box(210, 120, 160, 'proxy', 'connects as its own user'), box(10, 120, 120, 'network', 'outbound')));
}

function showRules(p) {
  $('rules').replaceChildren(...(p.chains ?? []).map(c => element('div', {class: 'chain'},
    element('h4', {}, `${c.family} ${c.backend ? `(${c.backend}) ` : ''}table ${c.table}, chain ${c.chain}${c.hook ? `, hook ${c.hook}` : ''}`),
    ...c.rules.map(r => element('p', {class: `rule ${r.op ?? ''}`}, r.rule, r.op ? ` [${r.op}]` : '', r.why ? ' ' : '',
      r.why ? element('small', {}, `# ${r.why}`) : '')))));
  $('listeners').replaceChildren(...(p.listeners ?? []).map(l => element('li', {}, `${l.address}, user ${l.uid}`)));
}

async function showPod() {
  const key = decodeURIComponent(location.hash.slice(1));
  chosen = key;
  $('pod').hidden = !key;
  if (!key) return;
  $('pod-title').textContent = key;
  $('verdict').textContent = '';
  $('hops').replaceChildren();
  try {
    const [namespace, name] = key.split('/');
    const p = await get(`api/pods/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`);
    if (key !== chosen) return;
    $('sentence').replaceChildren(element('strong', {class: tone(p.state)}, p.state), `: the pod ${p.sentence}`);
    $('remedy').textContent = p.remedy ? `Remedy: ${p.remedy}.` : '';
    $('problems').replaceChildren(...(p.problems ?? []).map(x => element('li', {}, `${x.state}: ${x.detail}`)));
    $('exceptions-box').hidden = !p.exceptions?.length;
    $('exceptions').replaceChildren(...(p.exceptions ?? []).map(x => element('li', {}, element('code', {}, `${x.setting}=${x.value}`), `: ${x.traffic}`)));
    drawPath(p);
    showRules(p);
    fail();
  } catch (error) {
    $('sentence').textContent = error.message;
    for (const id of ['remedy', 'problems', 'exceptions', 'path', 'rules', 'listeners']) $(id).replaceChildren();
  }
}

async function walk(event) {
  event.preventDefault();
  const query = new URLSearchParams();
  for (const [key, value] of new FormData($('walk'))) {
    if (value !== '') query.set(key, value);
  }
  const [namespace, name] = chosen.split('/');
  try {
    const pod = await get(`api/pods/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}?${query}`);
    const w = pod.answer;
    if (!w) throw new Error(pod.inspectionError ?? 'no answer');
    $('verdict').replaceChildren(element('strong', {}, w.sentence));
    $('hops').replaceChildren(...w.hops.map(h => element('li', {class: {matched: 'yes', unknown: 'unknown'}[h.answer] ?? 'no'}, element('code', {}, `${h.hook} ${h.table}/${h.chain} ${h.rule}`), h.why ? ` — ${h.why}` : '')));
  } catch (error) {
    $('verdict').textContent = error.message;
    $('hops').replaceChildren();
  }
}

const phases = ['read', 'decide', 'program'];

function showDecisions(all) {
  const longest = Math.max(0.001, ...all.map(d => d.seconds?.total ?? 0));
  $('decisions').replaceChildren(...all.map(d => element('tr', {},
    element('td', {title: d.time}, ago(d.time)), element('td', {}, `${d.namespace}/${d.pod}`),
    element('td', {class: d.captured ? 'good' : ''}, d.captured ? 'yes' : 'no'), element('td', {}, d.reason), element('td', {}, d.source),
    element('td', {}, element('span', {class: 'bar'}, ...phases.map(name => {
      const bar = element('i', {class: name, title: `${name}: ${((d.seconds?.[name] ?? 0) * 1000).toFixed(1)} ms`});
      bar.style.width = `${120 * (d.seconds?.[name] ?? 0) / longest}px`;
      return bar;
    })), `${((d.seconds?.total ?? 0) * 1000).toFixed(1)} ms`),
    element('td', {class: d.error ? 'bad' : ''}, d.error || d.detail || ''))));
}

function showReady(r) {
  $('version').textContent = r.version ?? '';
  $('ready').replaceChildren(...(r.parts ?? []).map(p => element('li', {class: p.ready ? 'good' : 'bad', title: p.since}, `${p.name}: ${p.ready ? 'ready' : p.reason}`)));
}

async function refresh() {
  try {
    const [ready, all, decisions] = await Promise.all([get('readyz'), get('api/pods'), get('decisions?limit=64')]);
    showReady(ready);
    pods = all;
    showPods();
    showDecisions(decisions);
    fail();
  } catch (error) {
    fail(error);
  }
}

$('search').addEventListener('input', showPods);
$('faulty').addEventListener('change', showPods);
$('walk').addEventListener('submit', walk);
$('walk').addEventListener('change', () => { $('walk').dataset.direction = $('walk').elements.direction.value; });
$('walk').dataset.direction = 'out';
window.addEventListener('hashchange', () => { showPod(); showPods(); });
refresh().then(showPod);
setInterval(refresh, 10000);
