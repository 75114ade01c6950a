'use strict';
// The page shows what the agent's JSON says. Names, annotations and rules can be what a pod's author wrote: they reach the
// document as text and as values of attributes only, and lists are bounded whatever a pod has.
//
// Start at refresh. Each show… function builds what it wants and patch changes the document where that differs, so that focus,
// scroll position and opened details survive.

const pause = 5000; // ms between the answers and the next requests
const equal = 10; // pods with one cause from this number on are one row
const maxRows = 200;
const decisionsSize = 64;
const maxChains = 200;

const $ = id => document.getElementById(id);

/** element makes an element of HTML with attributes and children; strings become text nodes, undefined and '' nothing. */
const element = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);

/** draw makes an element of SVG. */
const draw = (name, attributes = {}, ...children) => fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, children);

function fill(e, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== '' && value !== false) e.setAttribute(key, value);
  }
  e.append(...children.flat().filter(c => c !== undefined && c !== ''));
  return e;
}

/** patch gives a parent these children by the fewest changes. Whether a detail is open is the reader's; one with another key is a new one. */
function patch(parent, ...children) {
  const wanted = children.flat().filter(c => c !== undefined && c !== '');
  const have = [...parent.childNodes];
  wanted.forEach((w, i) => {
    const node = w instanceof Node ? w : document.createTextNode(w);
    const old = have[i];
    if (!old) parent.append(node);
    else if (old.nodeName !== node.nodeName || old.dataset?.key !== node.dataset?.key) old.replaceWith(node);
    else if (node.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else {
      for (const a of [...old.attributes]) if (a.name !== 'open' && !node.hasAttribute(a.name)) old.removeAttribute(a.name);
      for (const a of node.attributes) if (a.name !== 'open' && old.getAttribute(a.name) !== a.value) old.setAttribute(a.name, a.value);
      patch(old, ...node.childNodes);
    }
  });
  have.slice(wanted.length).forEach(node => node.remove());
}

/** say shows a text in an element that is hidden without one. */
function say(id, ...text) {
  patch($(id), ...text);
  $(id).hidden = $(id).childNodes.length === 0;
}

/** get reads JSON. An error has the answer's status, 0 if there is no answer. */
async function get(path) {
  let answer;
  try {
    answer = await fetch(path, {headers: {Accept: 'application/json'}, signal: AbortSignal.timeout(20000)});
    const failed = !answer.ok && path !== 'readyz'; // its 503 is an answer with reasons
    if (!failed) return await answer.json();
    return await Promise.reject(Object.assign(new Error((await answer.text()).trim().slice(0, 2000) || answer.statusText), {status: answer.status}));
  } catch (error) {
    throw Object.assign(error, {status: error.status ?? 0});
  }
}

const tone = state => ({captured: 'good', 'not-inspected': 'warn', sandboxed: 'warn', pending: 'warn', outside: 'quiet'})[state] ?? 'bad';

/** sign says the same as a tone's colour. */
const sign = tone => ({good: '✓', bad: '✗', warn: '!', quiet: '–'})[tone];

/** ago is the time since then by its largest unit. */
function ago(text) {
  const seconds = Math.max(0, (Date.now() - Date.parse(text)) / 1000);
  if (Number.isNaN(seconds)) return '-';
  const [unit, size] = [['d', 86400], ['h', 3600], ['min', 60]].find(([, size]) => seconds >= size) ?? ['s', 1];
  return `${Math.floor(seconds / size)} ${unit}`;
}

const time = text => element('time', {datetime: text, title: text}, ago(text));

const plural = (n, what) => `${count(n)} ${what}${n === 1 ? '' : 's'}`;

/** chosen is the pod that the address names by #NAMESPACE/NAME. */
function chosen() {
  try {
    const [namespace, name, rest] = location.hash.slice(1).split('/').map(decodeURIComponent);
    return {namespace, name, valid: Boolean(namespace && name && rest === undefined), none: !location.hash.slice(1)};
  } catch {
    return {valid: false, none: false};
  }
}

const count = n => n.toLocaleString('en');

/** span is a number of seconds in words. */
const span = seconds => seconds % 60 ? `${seconds} s` : `${seconds / 60} min`;

/** command is a command with a button that copies it. */
const command = text => element('div', {class: 'command'}, element('code', {}, text), element('button', {type: 'button', 'data-copy': text}, 'Copy'));

const link = p => element('a', {href: `#${encodeURIComponent(p.namespace)}/${encodeURIComponent(p.pod)}`}, `${p.namespace}/`, element('span', {class: 'pod'}, p.pod));

// ---- the node ----

let pods = [];
let state = 'all'; // the only one that is shown
let agent = {}; // what it says about itself

/** why is one line about a pod, as the command pods has it. */
function why(p) {
  const n = p.problems?.length ?? 0;
  return n ? p.problems[0].detail + (n > 1 ? ` (and ${n - 1} more)` : '') : p.sentence ?? '';
}

/** grouped has a row for each pod, or for many pods with one state and one cause. */
function grouped(some) {
  const cause = p => `${p.state} ${p.exceptions?.length ?? 0} ${why(p).replaceAll(/\d[\d.]*|\[[\da-f:]+\]/g, '')}`; // without addresses and process ids
  return [...Map.groupBy(some, cause).values()].flatMap(g => g.length >= equal ? [g] : g.map(p => [p]));
}

/** namesOf folds the names of a row's pods. */
const namesOf = group => element('details', {'data-key': `${group[0].state} ${why(group[0])}`}, element('summary', {}, 'their names'),
  element('ul', {}, group.slice(0, maxRows).map(p => element('li', {}, link(p)))),
  group.length > maxRows ? element('p', {class: 'quiet'}, `and ${count(group.length - maxRows)} more: search for a name`) : '');

function rowOf(group) {
  const [p] = group;
  const many = group.length > 1;
  const namespaces = [...new Set(group.map(x => x.namespace))];
  const exceptions = p.exceptions?.length ?? 0;
  const cell = (name, ...children) => element('td', {role: 'cell', class: name}, ...children.flat());
  const of = namespaces.length > 1 ? plural(namespaces.length, 'namespace') : namespaces[0];
  return element('tr', {role: 'row'},
    element('td', {role: 'cell', class: 'name', title: many ? '' : `${p.namespace}/${p.pod}`}, many ? `${plural(group.length, 'pod')} of ${of}` : link(p)),
    cell('line', element('span', {class: tone(p.state)}, `${sign(tone(p.state))} ${p.state}`)),
    cell('line quiet', p.since && !many ? [time(p.since), ' ago'] : ''),
    cell('', why(p), exceptions ? element('span', {class: 'chip warn', title: 'its own settings let traffic past the proxy'}, plural(exceptions, 'exception'), many ? ' each' : '') : '',
      many ? namesOf(group) : ''));
}

function showPods() {
  const search = $('search').value.trim().toLowerCase();
  const mesh = pods.filter(p => p.state !== 'outside');
  const counts = new Map();
  for (const p of mesh) counts.set(p.state, (counts.get(p.state) ?? 0) + 1);
  if (!counts.has(state)) state = 'all';
  const matches = p => !search || `${p.namespace}/${p.pod} ${p.state} ${why(p)}`.toLowerCase().includes(search);
  const some = mesh.filter(p => (state === 'all' || p.state === state) && matches(p));
  const outside = pods.filter(p => p.state === 'outside' && matches(p));
  const rows = grouped(some);
  const chip = (value, n) => element('button', {type: 'button', 'data-state': value, 'aria-pressed': String(value === state), class: value === 'all' ? '' : tone(value)}, `${value}: ${count(n)}`);
  patch($('states'), counts.size > 1 ? [chip('all', mesh.length), ...[...counts].map(([value, n]) => chip(value, n))] : '');
  patch($('pods'), rows.slice(0, maxRows).map(rowOf));
  patch($('found'), search || state !== 'all' ? `${plural(some.length + (search ? outside.length : 0), 'pod')} of ${count(search ? pods.length : mesh.length)}` : '');
  say('more', rows.length > maxRows ? `and ${count(rows.length - maxRows)} more rows: search for a namespace, a name or a cause` : '');
  if (search && !some.length && outside.length) $('outside').open = true;
  showOutside(outside);
}

/** showOutside folds the pods that the plugin leaves alone, by namespace and cause. */
function showOutside(outside) {
  const namespaces = Map.groupBy(outside, p => p.namespace);
  const names = [...namespaces].slice(0, 5).map(([name, some]) => `${name} ${count(some.length)}`).join(', ');
  $('outside').hidden = outside.length === 0;
  patch($('outside-title'), `${plural(outside.length, 'pod')} outside of the mesh: ${names}${namespaces.size > 5 ? `, ${namespaces.size - 5} more namespaces` : ''}`);
  patch($('outside-pods'), [...namespaces.values()].flatMap(grouped).slice(0, maxRows).map(rowOf));
}

/** showHeadline says in one sentence how the node's pods are; failed is why that is not known. */
function showHeadline(failed) {
  const mesh = pods.filter(p => p.state !== 'outside');
  const unknown = mesh.filter(p => p.state === 'not-inspected').length;
  const faulty = mesh.filter(p => p.state !== 'captured').length - unknown;
  const more = unknown ? `, ${count(unknown)} not inspected` : '';
  const on = `on ${agent.node || 'this node'}`;
  let [words, how] = [`All ${count(mesh.length)} mesh pods ${on} are redirected as wanted`, 'good'];
  if (mesh.length === 1) words = `The mesh pod ${on} is redirected as wanted`;
  if (unknown) [words, how] = [`${count(unknown)} of ${plural(mesh.length, 'mesh pod')} ${on} ${unknown === 1 ? 'is' : 'are'} not inspected`, 'warn'];
  const worst = mesh.some(p => tone(p.state) === 'bad') ? 'bad' : 'warn';
  if (faulty) [words, how] = [`${count(faulty)} of ${plural(mesh.length, 'mesh pod')} ${on} ${faulty === 1 ? 'is' : 'are'} not redirected as wanted${more}`, worst];
  if (!mesh.length) [words, how] = [`No pod ${on} is in the mesh`, 'quiet'];
  if (failed) [words, how] = [agent.audit === 'off' ? `The audit ${on} is off: no pod is verified` : `The state of the pods ${on} is not known`, 'warn'];
  $('headline').className = how;
  patch($('headline'), `${sign(how)} ${words}`);
  $('listed').hidden = Boolean(failed) || !pods.length;
  if (!failed && !mesh.length) say('pods-failure', ...enrol());
}

const enrol = () => [element('p', {}, 'To put the pods of a namespace into the mesh, give each a sidecar, or enrol them in ambient mode where the agent serves it:'),
  command('kubectl label namespace NAMESPACE istio-injection=enabled && kubectl -n NAMESPACE rollout restart deployment'),
  command('kubectl label namespace NAMESPACE istio.io/dataplane-mode=ambient'),
  element('p', {class: 'quiet'}, 'If pods of the mesh run here, see why the plugin leaves them alone, in the list below or by "kubectl istio-cni why".')];

const remedies = [
  ['switched off', 'Switch it on; until then "istio-cni why --pid PID" reads one pod\'s rules on the node.', 'helm upgrade istio-cni manifests/istio-cni -n istio-system --reuse-values --set audit.interval=5m'],
  ['the node agent lacks', 'Give the agent what it lacks: the chart does if audit.interval is more than 0.', 'kubectl istio-cni doctor'],
  ['has not begun', 'It begins when the API server has listed the node\'s pods; the page asks again.', 'kubectl istio-cni doctor'],
  ['no such pod', 'It is on another node, or gone. "kubectl istio-cni dashboard" with its name opens the page of its node.', 'kubectl get pods -A -o wide'],
];

/** explain is an error with what to do. */
function explain(error) {
  const [, text, line] = remedies.find(([part]) => error.message.includes(part)) ?? ['', 'It is tried again.'];
  return [element('p', {}, element('strong', {}, `${error.message.charAt(0).toUpperCase()}${error.message.slice(1)}.`)), element('p', {}, text), line ? command(line) : ''];
}

// ---- a pod ----

let pod; // the last answer about it
let question = ''; // the packet that is followed, as a query
let asked = ''; // the question of the answer that is shown
let refused = ''; // why the last question was none

const isAmbient = p => p.decision?.reason === 'ambient';
const isOutside = p => p.state === 'outside';

/** commandsOf are the commands that begin the remedy of a state. A name that a shell would read in another way gets none. */
function commandsOf(p) {
  const [ns, name] = [p.namespace, p.pod];
  if (![ns, name].every(text => /^[a-z0-9][a-z0-9.-]*$/.test(text))) return [];
  const restart = `kubectl -n ${ns} delete pod ${name}`;
  const proxy = isAmbient(p) ? `kubectl get pods -A -l app=ztunnel -o wide --field-selector spec.nodeName=${agent.node}` : `kubectl -n ${ns} logs ${name} -c istio-proxy --tail=50`;
  const describe = `kubectl -n ${ns} describe pod ${name}`;
  return {
    bypassed: [restart], drifted: [restart], 'foreign-rule': [`kubectl istio-cni why -n ${ns} ${name}`, restart], 'ipv6-open': [restart],
    'foreign-listener': [`kubectl istio-cni why -n ${ns} ${name}`], 'no-listener': [proxy, describe], pending: [proxy],
    'uid-collision': [`kubectl -n ${ns} get pod ${name} -o yaml | grep -n runAs`], 'not-inspected': [describe], sandboxed: [describe],
    outside: p.modes?.sidecar ? [`kubectl label namespace ${ns} istio-injection=enabled && ${restart}`] : [],
  }[p.state] ?? [];
}

/** remedyOf is the box with what to do. */
function remedyOf(p) {
  const lines = [];
  if (isOutside(p) && p.modes) {
    lines.push(element('p', {}, element('strong', {}, 'What to do: nothing, unless the pod should be in the mesh.')));
    if (p.modes.sidecar) lines.push(element('p', {}, `With a sidecar: ${p.modes.sidecar}.`));
    if (p.modes.ambient) lines.push(element('p', {}, `In ambient mode: ${p.modes.ambient}.`));
  } else if (p.remedy) {
    lines.push(element('p', {}, element('strong', {}, 'What to do: '), `${p.remedy}.`));
  }
  if (!lines.length) return '';
  const all = commandsOf(p);
  const deletes = all.some(text => text.includes('delete pod')) ? element('p', {class: 'quiet'}, 'The owner of the pod (Deployment, StatefulSet, …) creates it again; a pod without an owner is lost.') : '';
  return element('div', {class: 'box', role: 'group', 'aria-label': 'What to do'}, lines, all.map(command), deletes);
}

/** stepsOf are the steps of the enrolment in ambient mode: those before the one that the pod waits for are done. */
function stepsOf(p) {
  if (!isAmbient(p) || !['pending', 'captured'].includes(p.state)) return '';
  const waits = p.problems?.find(x => x.state === 'pending')?.detail.split(':')[0];
  const steps = [['namespace', /namespace|address|begun/], ['rules', /rules/], ['ztunnel', /ztunnel/], ['probes', /probe/], ['annotation', /annotation/]];
  const at = waits ? steps.findLastIndex(([, text]) => text.test(waits)) : steps.length;
  const unwritten = (p.chains ?? []).some(c => c.rules.some(r => r.op === 'missing'));
  return element('ol', {class: 'steps', 'aria-label': 'steps of the enrolment'}, steps.map(([name], i) => {
    const how = i === at ? 'warn' : i > at || (name === 'rules' && unwritten) ? 'quiet' : 'good';
    return element('li', {class: how}, `${{good: '✓', warn: '! waiting for', quiet: '○'}[how]} ${name}`);
  }));
}

/** factsOf is the list of what is known about the pod besides its state. */
function factsOf(p) {
  const d = p.decision ?? {};
  const i = p.injection ?? {};
  const proxy = isAmbient(p) ? 'the node\'s ztunnel (ambient mode)' : i.proxy ? `sidecar, as ${i.proxy}` : '';
  const rows = [
    ['Proxy', proxy], ['Injected by', p.injected ? `istiod${i.revision ? `, revision ${i.revision}` : ''}` : ''],
    ['Redirection set up by', {'istio-validation': 'the CNI plugin (istio-validation checks it)'}[i.setup] ?? i.setup],
    ['The plugin decides', isOutside(p) ? '' : d.sentence && `${d.captured ? 'redirect' : 'leave alone'}: ${d.sentence}${d.detail ? ` (${d.detail})` : ''}`],
    ['Detail', isOutside(p) ? d.detail : ''], ['In this state for', p.since && time(p.since)], ['Inspected', p.checked && [time(p.checked), ' ago']], ['Rules written by', p.backend],
    ['IPv6', p.picture?.ipv6],
  ];
  return element('dl', {}, rows.filter(([, value]) => value).flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)]));
}

function showState(p) {
  const how = tone(p.state);
  const name = isAmbient(p) && p.state === 'captured' ? 'captured, enrolled in ambient mode' : p.state;
  const problems = (p.problems ?? []).filter(x => x.state !== 'bypassed'); // whose sentence says all
  const unread = p.inspectionError && !isOutside(p) && !problems.some(x => x.detail.includes(p.inspectionError)) ? [{detail: `the network namespace could not be read: ${p.inspectionError}`}] : [];
  const [facts, exceptions] = [factsOf(p), p.exceptions ?? []];
  patch($('state'), element('p', {class: 'lead'}, element('strong', {class: how}, `${sign(how)} ${name}`), `: the pod ${p.sentence}.`),
    problems.length + unread.length ? element('ul', {'aria-label': 'problems'}, [...problems, ...unread].map(x => element('li', {}, x.state && x.state !== p.state ? `${x.state}: ` : '', x.detail))) : '',
    stepsOf(p), remedyOf(p), facts,
    exceptions.length ? element('p', {class: 'warn'}, `! ${plural(exceptions.length, 'exception')}: its own settings let traffic past the proxy, see below.`) : '');
}

const hopsOf = p => p.answer?.hops ?? [];
const isLit = h => h.answer === 'matched';

/** isFamily reports whether a chain is of the family of the packet in question. */
const isFamily = c => c.family === 'inet' || (c.family.includes('6') === /(to|from)=%5B|from=[^&]*%3A/.test(question));

/** chainsOf has, for each hook, its chains as one row for both families: those that its rules lead to, or should lead to. */
function chainsOf(p) {
  const hooks = new Map();
  const foreign = (p.problems ?? []).some(x => x.state === 'foreign-rule');
  const all = p.chains ?? [];
  const byName = new Map();
  for (const c of all) {
    const name = `${c.family} ${c.table} ${c.chain}`;
    byName.set(name, [...byName.get(name) ?? [], c]);
  }
  const add = (hook, c, live) => {
    const rows = hooks.get(hook) ?? hooks.set(hook, new Map()).get(hook);
    const name = `${c.table} ${c.chain}`;
    const row = rows.get(name) ?? rows.set(name, {table: c.table, chain: c.chain, rules: 0, missing: 0, extra: 0, foreign: 0, live: false}).get(name);
    if (row.live === false) row.live = live;
    row.rules += (c.omitted ?? 0) + c.rules.filter(r => r.op !== 'missing').length;
    for (const r of c.rules) if (r.op) row[r.op] += 1;
    row.bad = row.missing + row.extra > 0 || (foreign && row.foreign > 0) || !row.live;
  };
  for (const base of all.filter(c => c.hook)) {
    const seen = new Map([[base, true]]); // chain, and whether live rules lead to it
    for (const [c, live] of seen) { // grows meanwhile
      add(base.hook, c, live);
      for (const r of c.rules) {
        const to = /(?:-[jg]|jump|goto) (\S+)/.exec(r.rule.replace(/"(\\.|[^"\\])*"/g, ''))?.[1];
        for (const next of byName.get(`${c.family} ${c.table} ${to}`) ?? []) {
          if (!seen.has(next)) seen.set(next, live && r.op !== 'missing');
        }
      }
    }
  }
  return new Map([...hooks].map(([hook, rows]) => [hook, [...rows.values()]]));
}

// ---- the picture ----

/** kinds are the packets of package walk that the picture shows. */
const kinds = {inbound: 'inbound TCP connections', outbound: 'the app\'s outbound TCP connections', dns: 'the app\'s DNS queries', own: 'the app\'s TCP connections to its own pod',
  probes: 'the node\'s probes', tunnels: 'inbound tunnels (HBONE)'};

/** endsOf are the different ends of a kind of packets, each with the families of the pod whose packets have it. */
function endsOf(p, kind) {
  const all = new Map();
  const families = (p.picture.ways ?? []).filter(w => w.packets === kinds[kind] && (w.family !== 'IPv6' || p.picture.ipv6));
  for (const w of families) {
    for (const e of w.ends) {
      const key = `${e.verdict} ${e.port} ${e.wanted}`;
      all.set(key, {...e, families: [...all.get(key)?.families ?? [], w.family]});
    }
  }
  return [...all.values()].map(e => ({...e, only: e.families.length < families.length ? ` over ${e.families[0]}` : ''})).sort((a, b) => b.wanted - a.wanted);
}

/** whoOf is the proxy of the pod's mode. */
const whoOf = p => p.picture.tunnel ? 'ztunnel' : 'the proxy';

/** proxyOf is the proxy's station at a port, with whether something listens there. */
function proxyOf(p, port) {
  const name = p.picture.tunnel ? 'ztunnel' : 'proxy';
  const bad = (p.problems ?? []).find(x => ['foreign-listener', 'no-listener'].includes(x.state) && x.detail.includes(`:${port},`));
  const heard = (p.listeners ?? []).some(l => l.address.endsWith(`:${port}`));
  if (bad) return {label: `${name} :${port}`, note: bad.state === 'no-listener' ? '✗ nothing listens' : '✗ another program listens', tone: 'bad'};
  return heard ? {label: `${name} :${port}`, note: '✓ listens', tone: 'good'} : {label: `${name} :${port}`, note: '! no listener yet', tone: 'warn'};
}

/** tcpOf are the ways of a lane's TCP connections: those that packets take, and the one that is missing. */
function tcpOf(p, kind, port, what) {
  const broken = p.state === 'pending' ? 'warn' : 'bad';
  const ends = endsOf(p, kind);
  const ways = ends.map(e => {
    const text = `${ends.length > 1 && !e.wanted ? `some ${what}` : what}${e.only}`;
    switch (e.verdict) {
      case 'redirected': case 'handed-over': {
        const proxy = proxyOf(p, e.port || port);
        const note = {bad: ': refused', warn: ': refused until it listens'}[kind === 'dns' ? '' : proxy.tone];
        return {text: text + (note ?? ''), tone: !e.wanted || (note && proxy.tone === 'bad') ? 'bad' : proxy.tone, proxy, refused: Boolean(note)};
      }
      case 'passed': return {text: `${text}: past ${whoOf(p)}`, tone: e.wanted ? 'quiet' : broken};
      case 'fails': return {text: `${text} fail: a rule drops the answers`, tone: 'bad', stop: 'fail'};
      case 'dropped': case 'rejected': return {text: `${text}: ${e.verdict} by a rule`, tone: 'bad', stop: e.verdict};
      default: return {text: `${text}: cannot tell`, tone: 'warn', stop: 'unknown'};
    }
  });
  if (ends.length && !ends.some(e => e.wanted)) ways.unshift({text: `${what} to ${whoOf(p)}`, tone: 'missing', proxy: proxyOf(p, port)});
  return ways;
}

/** exceptionsOf are the ways of a lane that the pod's own settings open. */
const exceptionsOf = (p, lane) => (p.exceptions ?? []).filter(x => x.traffic.startsWith(lane) || x.traffic.startsWith('traffic'))
  .map(x => ({text: `${x.traffic}: ${x.setting.split('/').at(-1)}=${short(x.value, 60)}`, tone: 'warn', exception: true}));

const short = (text, most) => text.length > most ? `${text.slice(0, most - 1)}…` : text;

/** ipv6Of is the way of IPv6 that is not captured. */
const ipv6Of = p => ({
  bypassed: [{text: `IPv6: past ${whoOf(p)}`, tone: 'bad'}],
  rejected: [{text: 'IPv6: rejected, as set', tone: 'quiet', stop: 'rejected'}],
})[p.picture.ipv6] ?? [];

/** tunnelsOf is the way of the connections of other ztunnels, which no rule redirects. */
function tunnelsOf(p) {
  const [end] = endsOf(p, 'tunnels');
  if (!end) return [];
  const proxy = proxyOf(p, p.picture.tunnel);
  const tone = !end.wanted ? 'bad' : proxy.tone !== 'good' && p.state === 'pending' ? 'missing' : proxy.tone;
  return [{text: `tunnels of other ztunnels (HBONE)${end.wanted ? '' : `: ${end.verdict}`}`, tone, proxy, refused: tone !== 'good'}];
}

/** lanesOf are both directions, each with its rules and with the ways behind them. */
function lanesOf(p) {
  const direct = p.picture.direct ?? [];
  const past = `past ${whoOf(p)}`;
  const inbound = [...tcpOf(p, 'inbound', p.ports.inbound, 'TCP connections'),
    ...tunnelsOf(p), ...endsOf(p, 'probes').slice(0, 1).map(e => e.wanted ? {text: `the kubelet's probes: ${past}`, tone: 'quiet'} : {text: `the kubelet's probes: ${e.verdict}`, tone: 'bad', stop: e.verdict}),
    ...direct.length ? [{text: `ports ${direct.join(', ')}: the proxy's own, for health and metrics`, tone: 'quiet', proxy: {label: 'proxy', note: 'itself', tone: 'quiet'}, end: true}] : [],
    ...exceptionsOf(p, 'inbound'), ...ipv6Of(p)];
  const dns = p.picture.dns ? tcpOf(p, 'dns', p.picture.dns, 'DNS queries') : [{text: `DNS queries (UDP): ${past}, as DNS is not captured`, tone: 'quiet'}];
  const own = endsOf(p, 'own').map(e => e.verdict === 'passed' && e.wanted ? {text: 'to its own pod, such as 127.0.0.1: not redirected', tone: 'quiet', stop: 'stays in the pod'}
    : {text: `to its own pod: ${e.verdict}`, tone: 'bad', stop: e.verdict});
  const collision = (p.problems ?? []).some(x => x.state === 'uid-collision') ? [{text: `a process with the proxy's user: ${past}`, tone: 'bad'}] : [];
  const outbound = [...tcpOf(p, 'outbound', p.ports.outbound, 'TCP connections'), ...collision, ...dns, ...exceptionsOf(p, 'outbound'), ...own.slice(0, 1),
    {text: `other UDP: ${past}, as in every pod of the mesh`, tone: 'quiet'}, ...ipv6Of(p)];
  return [{name: 'inbound', from: 'clients', hooks: ['prerouting', 'input'], ways: inbound, to: 'application'},
    {name: 'outbound', from: 'application', hooks: ['output', 'postrouting'], ways: outbound, to: 'servers'}];
}

/** light adds the way of the packet in question to its lane. */
function light(p, lanes) {
  const a = p.answer;
  if (!a || !question || !lanes.length) return;
  const lane = lanes[new URLSearchParams(question).get('direction') === 'in' ? 0 : 1];
  const way = {text: `the packet below: ${a.verdict.replace('-', ' ')}`, tone: 'lit'};
  if (a.verdict === 'redirected' || a.verdict === 'handed-over') {
    const port = Number(/:?(\d+)$/.exec(a.to ?? '')?.[1] ?? 0);
    way.proxy = {...proxyOf(p, port), ...a.deaf || a.noListener ? {note: '✗ nothing listens', tone: 'bad'} : {}};
    way.refused = a.deaf || a.noListener;
  } else if (a.verdict !== 'passed') {
    way.stop = a.verdict.replace('-', ' ');
  }
  lane.ways = [way, ...lane.ways];
}

/** hookOf is the station of a lane's rules: it names the chains that are not as wanted only. */
function hookOf(p, lane, chains) {
  const rows = lane.hooks.flatMap(name => chains.get(name) ?? []);
  const rules = rows.reduce((n, r) => n + r.rules, 0);
  const missing = rows.reduce((n, r) => n + r.missing, 0);
  const faults = rows.filter(r => r.bad || r.foreign || r.extra);
  const title = element('strong', {}, lane.hooks[0].toUpperCase());
  const station = (how, ...lines) => element('div', {class: `station hook ${how}`}, title, lines.flat());
  if (!rows.length) return station(p.state === 'pending' ? 'warn' : 'bad', element('span', {class: 'note'}, 'no rules'));
  if (missing && rows.every(r => r.rules === 0)) return station(p.state === 'pending' ? 'warn' : 'bad', element('span', {class: 'note'}, `all ${missing} rules missing`));
  if (!faults.length) return station('good', element('span', {class: 'note'}, `✓ ${plural(rules, 'rule')}, as wanted`));
  const words = r => ['missing', 'extra', 'foreign'].filter(op => r[op]).map(op => `${r[op]} ${op}`).join(', ');
  const changed = faults.filter(words);
  const cut = faults.filter(r => !r.live).map(r => r.chain); // complete, and no rule leads there
  return station(faults.some(r => r.bad) ? 'bad' : 'warn',
    changed.slice(0, 10).map(r => element('span', {class: `chain ${r.bad ? 'bad' : 'warn'}`}, `${r.table.replace(/^istio-proxy-/, '')} ${r.chain}: ${words(r)}`)),
    changed.length > 10 ? element('span', {class: 'note'}, `and ${plural(changed.length - 10, 'more chain')}`) : '',
    cut.length ? element('span', {class: 'note', title: cut.slice(0, 10).join(', ')}, `no rule leads to ${plural(cut.length, 'chain')}`) : '');
}

const says = {good: '✓ ', bad: '✗ ', warn: '! ', missing: 'missing: ', lit: '→ ', quiet: ''};

/** wayOf draws one way from the rules on. What colour and line say is in its words, too. */
function wayOf(w, to) {
  const tones = w.tone === 'missing' || w.tone === 'lit' ? w.tone : `real ${w.tone}`;
  const arrives = !w.stop && !w.end && !w.refused && w.tone !== 'missing';
  const proxy = w.proxy && [element('span', {class: `station proxy ${w.proxy.tone}`}, element('span', {}, w.proxy.label), element('span', {class: 'note'}, w.proxy.note)),
    element('span', {class: `wire last ${arrives ? tones : 'none'}`})];
  return element('li', {class: `way ${w.proxy ? 'talks' : ''}`},
    element('span', {class: `track ${tones}`}, element('span', {class: `wire ${tones}`}), element('span', {class: 'label'}, says[w.tone] + w.text)), ...proxy ?? [],
    w.stop ? element('span', {class: `stop ${w.tone}`}, `■ ${w.stop}`) : '', arrives ? element('span', {class: `to ${w.tone}`}, `→ ${to}`) : '');
}

/** summaryOf is the picture in one sentence, with its tone. */
function summaryOf(p, lanes) {
  const of = tone => lanes.flatMap(l => l.ways.filter(w => w.tone === tone && !w.exception).map(w => `${l.name} ${w.text}`));
  const excluded = lanes.some(l => l.ways.some(w => w.exception)) ? ', except what the pod\'s settings exclude (amber)' : '';
  const through = lanes.filter(l => l.ways.some(w => w.tone === 'good')).map(l => l.name).join(' and ') || 'no';
  if (isOutside(p) && !p.picture) return ['', 'The plugin leaves this pod alone: its packets pass no proxy.'];
  if (!lanes.length) return ['warn', 'Its rules could not be read, so the ways of its packets are not known.'];
  if (of('bad').length) return ['bad', `Not as wanted: ${of('bad').join('; ')}.`];
  if (of('warn').length) return ['warn', `Not yet as wanted: ${of('warn').join('; ')}.`];
  if (tone(p.state) === 'bad') return ['warn', `The rules are not the wanted ones, but ${through} TCP connections go through ${whoOf(p)}${excluded}.`];
  return [through === 'no' ? 'warn' : 'good', `${through[0].toUpperCase()}${through.slice(1)} TCP connections go through ${whoOf(p)}${excluded}.`];
}

function showPath(p) {
  const all = [{text: 'all packets', tone: 'quiet'}];
  const alone = [{name: 'inbound', from: 'clients', ways: all, to: 'application'}, {name: 'outbound', from: 'application', ways: all, to: 'servers'}];
  const lanes = p.picture?.ways ? lanesOf(p) : isOutside(p) ? alone : [];
  const [how, words] = summaryOf(p, lanes);
  light(p, lanes);
  const chains = chainsOf(p);
  const end = text => element('div', {class: 'station end'}, element('span', {}, text));
  $('summary').className = how;
  patch($('summary'), how ? `${sign(how)} ${words}` : words);
  patch($('path'), lanes.flatMap(l => [element('h3', {class: 'quiet'}, l.name), element('div', {class: 'lane', role: 'group', 'aria-label': `${l.name}: from ${l.from} to ${l.to}`, 'data-lane': l.name},
    end(l.from), ...l.hooks ? [element('span', {class: 'wire first real quiet'}), hookOf(p, l, chains)] : [], element('ul', {class: 'ways'}, l.ways.map(w => wayOf(w, l.to))), end(l.to))]));
  say('legend', lanes.some(l => l.ways.some(w => w.tone === 'missing')) ? 'Solid: a way that packets take. Thin grey dashes: a way that is missing.' : '');
}

/** chainBox is a chain with its rules. */
function chainBox(c, matched) {
  const faults = c.rules.filter(r => r.op).length;
  const all = c.rules.length + (c.omitted ?? 0);
  const only = ['missing', 'foreign', 'extra'].find(op => c.rules.every(r => r.op === op));
  const words = only ? `, ${all > 1 ? `all ${all} ` : ''}${only}` : `, ${faults} not as wanted`;
  const rule = (r, i) => element('li', {class: r.op !== 'missing' && isFamily(c) && matched.has(`${c.table} ${c.chain} ${i + 1}`) ? 'lit' : ''},
    element('span', {class: `rule ${r.op ? 'bad' : ''}`}, r.rule), r.op ? [' ', element('span', {class: 'op bad'}, r.op)] : [], r.why ? element('span', {class: 'quiet'}, ` ${r.why}`) : '');
  return element('details', {'data-key': `${c.family} ${c.table} ${c.chain}`, open: all <= 80 ? 'open' : ''},
    element('summary', {}, `${c.family} table ${c.table}, chain ${c.chain}${c.hook ? `, hook ${c.hook}` : ''}: ${plural(all, 'rule')}`, faults ? element('span', {class: 'bad'}, words) : ''),
    element('ol', {}, c.rules.map(rule)), c.omitted ? element('p', {}, `and ${plural(c.omitted, 'more rule')}`) : '');
}

function showRules(p) {
  const all = (p.chains ?? []).slice(0, maxChains);
  const matched = new Set(hopsOf(p).filter(isLit).map(h => `${h.table} ${h.chain} ${h.number}`));
  const size = some => some.reduce((n, c) => n + c.rules.length + (c.omitted ?? 0), 0);
  const bad = all.filter(c => c.rules.some(r => r.op));
  const fine = all.filter(c => !bad.includes(c));
  const boxes = some => some.map(c => chainBox(c, matched));
  const fold = (id, how, text, some) => some.length ? element('details', {'data-key': id}, element('summary', {class: how}, text), boxes(some)) : '';
  const gone = bad.every(c => c.rules.every(r => r.op === 'missing')) && !fine.length;
  patch($('rules'), gone ? fold('missing', 'bad', `✗ all ${size(bad)} rules are missing`, bad) : boxes(bad),
    fold('wanted', 'good', `✓ ${plural(size(fine), 'rule')} in ${plural(fine.length, 'chain')}${fine.length === 1 ? ' is' : ' are'} as wanted`, fine),
    (p.chains ?? []).length > maxChains ? element('p', {}, `and ${plural(p.chains.length - maxChains, 'more chain')}`) : '',
    (p.unread ?? []).slice(0, maxChains).map(u => element('p', {class: 'warn'}, `! not read: ${u}`)));
  const sockets = p.listeners ?? [];
  $('sockets').hidden = !sockets.length;
  patch($('sockets-title'), `${plural(sockets.length, 'listening socket')}`);
  patch($('listeners'), element('ul', {}, sockets.slice(0, maxChains).map(l => element('li', {}, element('code', {}, l.address), ` of user ${l.uid}`))),
    sockets.length > maxChains ? element('p', {}, `and ${sockets.length - maxChains} more`) : '');
  $('redirected').hidden = !all.length && !p.unread?.length; // a packet's way would not be known, either
}

function showAnswer(p) {
  const a = p.answer;
  const hops = hopsOf(p);
  const how = a?.settings?.length ? 'warn' : {'as-wanted': 'good', 'past-the-mesh': 'bad'}[a?.wanted] ?? 'warn';
  $('verdict').className = how;
  if (!question) {
    $('verdict').className = 'bad';
    patch($('verdict'), refused);
    patch($('packet'));
    patch($('hops'));
    return;
  }
  patch($('packet'), a?.packet ? `The packet is ${a.packet}.` : '');
  patch($('verdict'), a?.sentence ? `${sign(how)} The packet ${a.sentence}.` : `Cannot tell: ${p.inspectionError || 'the pod is not redirected by the plugin, and has no rules to follow'}.`);
  const item = h => element('li', {class: isLit(h) ? 'lit' : ''}, `${h.hook.toUpperCase()} ${h.table}/${h.chain}${h.number ? ` rule ${h.number}` : ''}: `,
    element('span', {class: 'rule'}, h.rule), ` — ${h.answer}`, h.why ? element('span', {class: 'quiet'}, `, ${h.why}`) : '');
  const met = hops.filter(h => h.answer !== 'not-matched');
  const rest = hops.length - met.length + (a?.omitted ?? 0);
  patch($('hops'), element('ol', {'aria-label': 'rules that match'}, met.map(item)), rest ? element('details', {}, element('summary', {}, `all rules that it meets (${plural(rest, 'rule')} did not match)`), element('ol', {}, hops.map(item))) : '');
  if (asked !== question) {
    asked = question;
    for (const fold of document.querySelectorAll('#rules details:has(li.lit)')) fold.open = true;
  }
}

function showPod(p) {
  pod = p;
  say('pod-failure');
  $('pod-found').hidden = false;
  showState(p);
  showPath(p);
  showRules(p);
  showAnswer(p);
}

/** podFailed shows why there is no answer about the pod. A question that is not understood leaves the rest as it is. */
function podFailed(error) {
  if (error.status === 400 && question && pod) {
    question = '';
    refused = `${error.message}. Give an IP address, not a name: the pod's own resolver decides about names.`;
    showPod({...pod, answer: undefined});
    return;
  }
  say('pod-failure', ...explain(error));
  $('pod-found').hidden = !pod || error.status === 404;
}

// ---- decisions ----

const phases = ['read', 'decide', 'program'];
let older = [];

function showDecisions(latest, key) {
  const lowest = latest.at(-1)?.number ?? Infinity;
  const all = key.none ? [...latest, ...older.filter(d => d.number < lowest)] : latest.filter(d => d.namespace === key.namespace && d.pod === key.name);
  const longest = Math.max(0.001, ...all.map(d => d.seconds?.total ?? 0));
  const ms = s => `${(s * 1000).toFixed(1)} ms`;
  const bar = seconds => {
    let x = 0;
    const parts = phases.filter(name => seconds[name]).map(name => {
      const width = Math.max(1, 104 * seconds[name] / longest);
      return draw('rect', {class: name, x: (x += width) - width, y: 0, width, height: 12});
    });
    const label = phases.filter(name => seconds[name]).map(name => `${name} ${ms(seconds[name])}`).join(', ');
    return draw('svg', {viewBox: '0 0 110 12', role: 'img', 'aria-label': label}, draw('title', {}, label), parts);
  };
  const cell = (how, ...children) => element('td', {role: 'cell', class: how}, ...children);
  patch($('decisions'), all.map(d => element('tr', {role: 'row'}, cell('line quiet', time(d.time), ' ago'), cell('name', link(d)),
    cell('line', element('span', {class: d.error ? 'bad' : d.captured ? 'good' : 'quiet'}, d.error ? '✗ failed' : d.captured ? '✓ captured' : '– not captured'), d.reason && d.reason !== 'captured' ? `, ${d.reason}` : '',
      element('span', {class: 'quiet'}, d.source ? ` (${d.command ? `${d.command}, ` : ''}by ${d.source})` : '')),
    cell('line', d.seconds?.total ? [bar(d.seconds), ms(d.seconds.total)] : ''), cell(d.error ? 'bad' : '', d.error || d.detail || ''))));
  const failed = all.filter(d => d.error).length;
  patch($('calls-title'), `Calls of the plugin: ${all.length}`, failed ? element('span', {class: 'bad'}, `, ${failed} failed`) : '');
  $('no-decisions').hidden = all.length > 0;
  $('older').hidden = !key.none || !((all.at(-1)?.number ?? 1) > 1) || (older.end ?? false);
  $('older').dataset.before = all.at(-1)?.number ?? '';
}

async function showOlder() {
  const before = $('older').dataset.before;
  try {
    const more = await get(`decisions?limit=${decisionsSize}&before=${before}`);
    older = [...older, ...more];
    older.end = more.length < decisionsSize;
    $('older').hidden = older.end;
  } catch (error) {
    say('decisions-failure', ...explain(error));
  }
  refresh();
}

// ---- all of it ----

let timer;
let turn = 0;
let answered = new Date();

/** showReady folds what is ready; what is not comes first on the page. */
function showReady(r) {
  const parts = r.parts ?? [];
  const lacking = parts.filter(p => !p.ready);
  $('ready-state').className = lacking.length ? 'bad' : 'good';
  patch($('ready-state'), lacking.length ? `✗ agent not ready: ${lacking.map(p => p.name).join(', ')}` : '✓ agent ready');
  patch($('parts'), parts.map(p => element('li', {class: p.ready ? 'good' : 'bad', title: p.since}, `${p.name}: ${p.ready ? 'ready' : p.reason}`)));
  say('unready', ...lacking.length ? [element('p', {}, element('strong', {}, 'The agent is not ready: '), 'until it is, new pods of this node may not start, and pods may not be redirected.'),
    element('ul', {}, lacking.map(p => element('li', {}, `${p.name}: ${p.reason}`))), command('kubectl istio-cni doctor')] : []);
}

/** showAgent says who answers, what the audit does, and when. */
function showAgent() {
  const modes = {report: 'reports only (audit.mode=report)', repair: 'restores lost rules (audit.mode=repair)'};
  patch($('agent'), `node ${agent.node || 'without a name'}`);
  patch($('version'), `version ${agent.version}`);
  patch($('audit'), `Audit: ${agent.audit === 'off' ? 'off' : `${modes[agent.audit]}, each pod at least every ${span(agent.interval)}`} · as of ${answered.toLocaleTimeString()}`);
}

/** showAlive says whether there was any answer. */
function showAlive(results) {
  const alive = results.some(r => r.status === 'fulfilled' || r.reason.status > 0);
  if (alive) answered = new Date();
  document.body.classList.toggle('stale', !alive);
  say('failure', ...alive ? [] : [element('p', {}, `The agent has not answered since ${answered.toLocaleTimeString()}: what is shown is of then. See whether "kubectl istio-cni dashboard" or `
    + `"kubectl port-forward" has ended, and whether its pod is running. It is tried again every ${pause / 1000} seconds.`), command('kubectl get pods -A -l k8s-app=istio-cni-node -o wide')]);
  return alive;
}

/** refresh asks the agent and shows its answers; it runs again after a pause while the page is visible. */
async function refresh() {
  clearTimeout(timer);
  const mine = ++turn;
  const key = chosen();
  let main = Promise.resolve();
  if (key.none) main = get('api/pods');
  else if (key.valid) main = get(`api/pods/${encodeURIComponent(key.namespace)}/${encodeURIComponent(key.name)}${question && `?${question}`}`);
  const results = await Promise.allSettled([get('api/agent'), get('readyz'), main, get(`decisions?limit=${key.none ? decisionsSize : 512}`)]);
  if (mine !== turn) return; // a later one has begun
  if (!document.hidden) timer = setTimeout(refresh, pause);
  if (!showAlive(results)) return;
  const [self, ready, shown, decisions] = results;
  if (self.value) agent = self.value;
  showAgent();
  if (ready.value) showReady(ready.value);
  if (key.none) {
    if (!shown.reason) pods = shown.value ?? [];
    say('pods-failure', ...shown.reason ? explain(shown.reason) : []);
    showPods();
    showHeadline(shown.reason);
  } else if (key.valid) {
    if (shown.reason) podFailed(shown.reason);
    else showPod(shown.value);
  }
  say('decisions-failure', ...decisions.reason ? explain(decisions.reason) : []);
  if (decisions.value) showDecisions(decisions.value, key);
}

/** copy copies a command, or selects it where the browser forbids to copy. */
async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    button.textContent = 'Copied';
  } catch {
    getSelection().selectAllChildren(button.previousSibling);
    button.textContent = 'Selected';
  }
}

/** navigate shows what the address names. */
function navigate() {
  const key = chosen();
  pod = undefined;
  question = asked = refused = '';
  older = [];
  $('walk').reset();
  for (const id of ['state', 'summary', 'path', 'rules', 'listeners', 'hops', 'verdict', 'packet', 'decisions']) patch($(id));
  $('node').hidden = $('headline').hidden = !key.none;
  $('pod').hidden = key.none;
  $('pod-found').hidden = true;
  patch($('pod-title'), key.valid ? `${key.namespace}/${key.name}` : 'No pod');
  document.title = key.none ? 'istio-cni' : `${$('pod-title').textContent} · istio-cni`;
  say('pod-failure', ...key.valid || key.none ? [] : [element('p', {}, `The address names no pod: want #NAMESPACE/NAME, got ${location.hash}`)]);
  if (!key.none) $('pod-title').focus();
  return refresh();
}

$('search').addEventListener('input', showPods);
$('states').addEventListener('click', event => {
  const button = event.target.closest('button');
  if (!button) return;
  state = button.dataset.state === state ? 'all' : button.dataset.state;
  showPods();
});
$('walk').addEventListener('submit', event => {
  event.preventDefault();
  const data = new FormData($('walk'));
  const fields = data.get('direction') === 'in' ? ['direction', 'from', 'port', 'udp'] : ['direction', 'to', 'uid', 'udp'];
  const query = new URLSearchParams();
  for (const name of fields) {
    const value = (data.get(name) ?? '').trim();
    if (value || name === 'to' || name === 'from') query.set(name, value);
  }
  question = query.toString();
  asked = refused = '';
  refresh();
});
$('walk').addEventListener('reset', () => { question = asked = refused = ''; if (pod) showPod({...pod, answer: undefined}); });
$('older').addEventListener('click', showOlder);
$('skip').addEventListener('click', event => { event.preventDefault(); $('main').focus(); });
window.addEventListener('hashchange', navigate);
document.addEventListener('click', event => {
  const button = event.target.closest('[data-copy]');
  if (button) copy(button);
});
document.addEventListener('visibilitychange', () => { if (!document.hidden) refresh(); });
navigate();
