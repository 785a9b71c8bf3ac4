"""The Spanish stories, in the notation of `treadle.data.stories`."""

LANGUAGE = "es"

LABELS = {
    "m": {"o": "o", "un": "un", "el": "el", "lo": "lo"},
    "f": {"o": "a", "un": "una", "el": "la", "lo": "la"},
    "fly": {"move": "volar", "moved": "voló"},
    "climb": {"move": "trepar", "moved": "trepó"},
}

NAMES = {
    "h": {"m": "Nico Hugo Mateo Tomás", "f": "Lola Elena Sofía Marta"},
    "f": {"m": "Bruno Simón Andrés Diego", "f": "Lucía Clara Carmen Nora"},
}

POOLS = {
    "animal/g/tags": """zorro/m/; conejo/m/; oso/m/; burro/m/; cordero/m/; perro/m/; cerdito/m/;
        cabra/f/; oveja/f/; gallina/f/; vaca/f/; gato/m/climb; gata/f/climb; ardilla/f/climb;
        búho/m/fly; cuervo/m/fly; gorrión/m/fly; paloma/f/fly; lechuza/f/fly; pato/m/swim;
        castor/m/swim; rana/f/swim; tortuga/f/swim; nutria/f/swim; ratón/m/small; erizo/m/small;
        topo/m/small; lagartija/f/small; ratita/f/small""",
    "adj/f": """valiente/valiente; alegre/alegre; amable/amable; curioso/curiosa; tímido/tímida;
        listo/lista; tranquilo/tranquila; generoso/generosa; joven/joven""",
    "home": """en el bosque; junto al río; en lo alto de una colina; cerca del mar; en una granja;
        a la orilla del lago; detrás del molino; en un valle verde; cerca de un pueblo pequeño; al
        final de un largo camino""",
    "hobby": """cantar; pintar; leer libros viejos; contar historias; correr por la hierba; contar
        las estrellas; buscar flores; mirar las nubes; dormir al sol; escuchar la lluvia; bailar""",
    "day/f": """soleado/soleada; tranquilo/tranquila; fresco/fresca; gris/gris; claro/clara;
        hermoso/hermosa""",
    "color/f": """rojo/roja; azul/azul; verde/verde; amarillo/amarilla; blanco/blanca;
        marrón/marrón""",
    "family": "abuela; abuelo; tía; tío",
    "toy/g": """pelota/f; tambor/m; sombrero/m; bufanda/f; cinta/f; libro/m; taza/f; cesta/f;
        muñeca/f""",
    "light/g": "cometa/f; globo/m; sombrero/m; bufanda/f; cinta/f",
    "thing/g/mend": """barco/m/un martillo y unos clavos; carro/m/un martillo y unos clavos;
        cometa/f/papel y pegamento; cesta/f/un poco de paja; tambor/m/un trozo de cuero; silla/f/un
        poco de madera; muñeca/f/aguja e hilo; trineo/m/un poco de madera""",
    "dish/g/need": """tarta/f/huevos; tarta/f/mantequilla; pastel/m/manzanas; pastel/m/azúcar;
        sopa/f/zanahorias; sopa/f/cebollas; flan/m/leche; pan/m/leche""",
    "food/g": "pera/f; manzana/f; naranja/f; melón/m; pastel/m; tarta/f",
    "fruit": "manzanas; peras; ciruelas; cerezas; naranjas",
    "gift/g": """corona de papel/f; collar de conchas/m; barco de madera/m; bufanda de lana/f;
        flauta de madera/f; sombrero de paja/m; muñeca de trapo/f""",
    "plant/g": "calabaza/f; melón/m; rosa/f; tomate/m",
    "skill": "cantar; bailar; silbar; leer; pintar; patinar",
    "need/gift": """frío/una manta de lana; hambre/un plato de sopa; sed/un vaso de leche; sueño/una
        almohada blanda""",
    "inside": """debajo de la cama; detrás de la puerta; en la cocina; debajo de la mesa; en el
        armario; sobre el estante; detrás de la silla""",
    "outside": """detrás del granero; debajo del puente; entre la hierba alta; junto al pozo; detrás
        de una roca; bajo un arbusto; al borde del camino; junto al viejo muro; debajo de un
        roble""",
}

MACROS = {
    "open": """[Había una vez {h.un} {h.kind} {adj:h} que se llamaba {h}. Vivía {home}.|
        Había una vez, {home}, {h.un} {h.kind} {adj:h} que se llamaba {h}.|
        {h} era {h.un} {h.kind} {adj:h} que vivía {home}.|
        Hace mucho tiempo vivía {home} {h.un} {h.kind} {adj:h} llamad{h.o} {h}.|
        {Home} vivía {h.un} {h.kind} muy {adj:h} que se llamaba {h}.]
        [Le gustaba [mucho|] {hobby}.|Le gustaba {hobby1} y {hobby2}.||||]""",
    "when": "[Una mañana {day.f}|Un día {day}|Una tarde {day.f}]",
    "meet": """[En ese momento pasó por allí {f}, {f.el} {f.kind}.|
        {f.Un} {f.kind} que se llamaba {f} pasaba por allí y se detuvo.|
        {f}, {f.el} {f.kind}, {h.lo} vio y se acercó.|
        Su amig{f.o} {f}, {f.el} {f.kind}, {h.lo} oyó y llegó corriendo.]""",
    "wrong": """«¿[Qué te pasa|Por qué estás tan triste|Qué ha pasado]?», preguntó {f}.""",
    "calm": "[No te preocupes|No estés triste|No llores]",
    "thanks": """[«¡Gracias, {f}!», dijo {h}.|
        «¡Muchas gracias!», dijo {h} con una gran sonrisa.|
        {h} le dio un fuerte abrazo. «Eres {f.un} gran amig{f.o}», le dijo.|
        {h} saltó de alegría. «¡Gracias, {f}!», gritó.]""",
    "end": """[Desde aquel día, {h} y {f} fueron [muy buen{g.o}s|grandes] amig{g.o}s.|
        Desde aquel día, {h} y {f} se vieron todas las tardes.|
        {h} nunca olvidó [aquel día|la bondad de {f}].|
        Aquella noche, {h} se durmió con una sonrisa.|
        Y l{g.o}s dos fueron muy felices.|
        <moral>]""",
    "homeward": """[<end>|
        L{g.o}s dos amig{g.o}s volvieron a casa junt{g.o}s.|
        L{g.o}s dos amig{g.o}s cantaron por todo el camino.|
        {h} volvió a casa [cansad{h.o} pero feliz|muy content{h.o}].]""",
    "moral": """[{h} sabía que la amistad vale más que el oro.|
        {h} aprendió que con ayuda todo es más fácil.|
        «Qué bueno es tener amigos», pensó {h}.|
        «Siempre hay una solución», pensó {h}.]""",
}

PLOTS = (
    # Something is lost.
    (
        "",
        "",
        """<open> Tenía {toy.un} {toy} {color:toy} [y {toy.lo} llevaba a todas partes|y {toy.lo}
        quería mucho|que era un regalo de su {family}]. <when>, {toy.el} {toy} desapareció. {h}
        {toy.lo} buscó {inside}, pero no {toy.lo} encontró. [Se sentó en el suelo y se echó a
        llorar|Se puso muy triste|No sabía qué hacer]. <meet> <wrong> «He perdido mi {toy}», dijo
        {h}. «<calm>. [Vamos a buscar{toy.lo} junt{g.o}s|Cuatro ojos ven más que dos|Yo te ayudo a
        buscar{toy.lo}]», dijo {f}. [Por fin|Al cabo de un rato|De pronto], {f} vio algo {color}
        {outside}. ¡Era {toy.el} {toy}! <thanks> <homeward>""",
    ),
    # The wind takes something up into a tree.
    (
        "!fly !climb",
        "fly climb",
        """<open> Un día de viento, jugaba con {light.un} {light} {color:light} [cerca del
        granero|en el campo|junto al río]. De pronto, el viento se llevó {light.el} {light} y
        {light.lo} dejó en lo más alto de un árbol. {h} [saltó y saltó, pero el árbol era demasiado
        alto|probó con un palo largo, pero no llegaba|tiró una piedra pequeña, pero no sirvió de
        nada]. <meet> <wrong> «Mi {light} está en el árbol y no puedo alcanzar{light.lo}», dijo {h}.
        «<calm>. [Yo sé {f.move}|Eso es fácil para mí]», dijo {f}. {f.El} {f.kind} {f.moved} hasta
        lo más alto y bajó {light.el} {light} [muy despacio|con mucho cuidado]. <thanks>
        <homeward>""",
    ),
    # Something breaks.
    (
        "",
        "",
        """<open> Había hecho {thing.un} {thing} sin ayuda de nadie y estaba muy orgullos{h.o}.
        <when>, [{h} se cayó encima|una piedra grande le cayó encima|una rama le cayó encima] y
        {thing.el} {thing} se rompió. «¡[Qué mala suerte|Ay, mi {thing}]!», exclamó {h} con lágrimas
        en los ojos. <meet> «<calm>. [En casa tengo {thing.mend}|Con {thing.mend} {thing.lo} podemos
        arreglar]», dijo {f}. Se sentaron [bajo un árbol|a la mesa|junto al fuego] y trabajaron
        [mucho tiempo|hasta la noche]. [{h} sujetaba {thing.el} {thing} y {f} hacía lo demás.|]
        Cuando terminaron, {thing.el} {thing} [estaba mejor que antes|parecía nuev{thing.o}].
        <thanks> <end>""",
    ),
    # The kitchen lacks something.
    (
        "",
        "",
        """<open> <when>, {h} quiso preparar {dish.un} {dish} para su {family}. Buscó en la cocina,
        pero no tenía {dish.need}. [«No puedo hacer {dish.un} {dish} sin {dish.need}», pensó.|]
        Entonces fue a casa de {f}, {f.el} {f.kind}, y llamó a la puerta. «Hola, {f}. ¿Tienes
        {dish.need}?», preguntó. «¡[Claro que sí|Por supuesto]! Toma [lo que necesites|todo lo que
        quieras]», dijo {f}. «¿Te ayudo?», preguntó después. L{g.o}s dos amig{g.o}s [trabajaron
        junt{g.o}s|cantaron mientras trabajaban], y pronto toda la casa olía a {dish}. [Todos
        dijeron|Su {family} dijo] que era {dish.el} mejor {dish} del [pueblo|mundo]. <end>""",
    ),
    # Somebody new is alone.
    (
        "",
        "",
        """<open> <when>, {h} vio a {f.un} {f.kind} que estaba sentad{f.o} {outside}. Acababa de
        llegar al pueblo y [no conocía a nadie|no tenía amigos]. «Hola, yo soy {h}. ¿Cómo te
        llamas?», preguntó {h}. «Me llamo {f}», respondió {f.el} {f.kind} en voz [baja|muy baja].
        «¿Quieres [jugar con mi {toy}|correr conmigo hasta el río|jugar conmigo]?», preguntó {h}.
        [«No sé cómo se hace», dijo {f}. «<calm>. Es fácil y yo te enseño», dijo {h}.|«Sí, por
        favor», dijo {f}.] [Corrieron, saltaron y rieron|Jugaron y rieron] hasta la puesta del sol.
        «¿Volverás mañana?», preguntó {f}. «¡[Mañana y todos los días|Claro que sí]!», dijo {h}.
        [Por primera vez en muchos días, {f} ya no se sentía sol{f.o}.|<homeward>]""",
    ),
    # A noise in the night.
    (
        "!small",
        "small",
        """<open> Una noche [oscura|fría|de viento], {h} oyó un ruido extraño {inside}. Tuvo tanto
        miedo que se escondió debajo de la manta. [«Es un monstruo», susurró.|Toc, toc, toc, hacía
        el ruido.] Pero quería ser valiente, así que tomó una lámpara y se acercó paso a paso. ¡No
        había ningún monstruo! Solo era {f.un} {f.kind} con [las patas mojadas|los ojos muy
        redondos]. «Por favor, no te enfades», dijo {f.el} {f.kind}. «Me llamo {f} y tengo {need}»,
        añadió. {h} se rio y le dio {need.gift}. «Puedes quedarte aquí esta noche», dijo {h}. [Y ya
        no volvió a tener miedo.|L{g.o}s dos hablaron hasta la mañana.|Desde aquella noche, {h} y
        {f} fueron muy buen{g.o}s amig{g.o}s.]""",
    ),
    # A birthday, and no money.
    (
        "",
        "",
        """<open> Era la víspera del cumpleaños de {f}, {f.el} {f.kind}, y {h} quería hacerle un
        regalo. Pero no tenía dinero. «¿Qué puedo hacer?», [pensó|se preguntó]. {h} se sentó
        {outside} y pensó. «¡Ya lo sé! ¡Haré {gift.un} {gift}!», dijo por fin. Trabajó toda la
        [tarde|noche] y guardó el regalo en una caja {color.f}. Por la mañana corrió a casa de {f}.
        «¡Feliz cumpleaños, {f}!», dijo. {f} abrió la caja y [sonrió|saltó de alegría|no podía
        creerlo]. «¡{gift.Un} {gift}! Es el mejor regalo de todos, porque lo has hecho tú», dijo
        {f}. [<end>|]""",
    ),
    # The bridge is broken.
    (
        "!swim !fly",
        "swim",
        """<open> <when>, {h} quiso visitar a su {family}, que vivía al otro lado del río. [Llevaba
        una cesta de {fruit}.|] Pero la lluvia había roto el puente y el agua [era muy
        profunda|bajaba muy rápida]. «¿Cómo voy a cruzar el río?», se preguntó. Entonces {f}, {f.el}
        {f.kind}, sacó la cabeza del agua. «[Yo te ayudo|Yo sé cómo]. Siéntate en ese tronco y no te
        sueltes», dijo {f}. {h} [tenía un poco de miedo, pero|] se sentó en el tronco. {f} nadó y
        empujó [con mucho cuidado|con todas sus fuerzas] hasta la otra orilla. [<thanks>|«¡Gracias,
        {f}! Ven a comer a casa», dijo {h}. Su {family} les dio sopa caliente y [pan|{fruit}].]
        <end>""",
    ),
    # Something is hard to learn.
    (
        "",
        "",
        """<open> Tenía un deseo: quería aprender a {skill}. En el pueblo todos sabían {skill},
        [pero {h} no|menos {h}]. Probó una vez, probó dos veces, y [los demás se rieron|todo salió
        mal]. «Nunca aprenderé», dijo con tristeza. {f}, {f.el} {f.kind}, {h.lo} oyó. «Nadie aprende
        en un día. [Prueba otra vez|Ven conmigo] y yo te enseñaré», dijo {f}. Practicaron junt{g.o}s
        todas las [mañanas|tardes]. [El primer día fue difícil, pero el segundo fue mejor.|] Al
        final de la semana, {h} ya sabía {skill} tan bien como {f}. Todos aplaudieron y {h} se
        sintió [muy orgullos{h.o}|más alt{h.o} que un árbol]. «¡[Lo has logrado|Muy bien]!», dijo
        {f}. [<end>|]""",
    ),
    # No rain for the garden.
    (
        "",
        "",
        """<open> En primavera, {h} plantó una semilla de {plant} detrás de su casa. Todas las
        mañanas [la regaba|iba a mirarla]. Pero llegaron días de mucho calor y no llovía. La pequeña
        planta [se moría|perdía sus hojas]. «Mi pobre planta tiene sed», dijo {h} con tristeza.
        <meet> «<calm>. El río tiene agua y yo tengo un [cubo grande|carro]», dijo {f}. [Toda la
        semana|Día tras día], l{g.o}s dos llevaron agua del río al jardín. [Una mañana|Por fin]
        tuvieron {plant.el} {plant} más [grande|hermos{plant.o}] del pueblo. «También es para ti,
        porque me has ayudado», dijo {h}. [<end>|]""",
    ),
    # The small one saves the big one.
    (
        "!small",
        "small",
        """<open> <when>, oyó una voz muy débil {outside}. «¡Ayuda! ¡Ayuda!», gritaba la voz. {f.Un}
        {f.kind} había caído en un hoyo profundo. {h} metió una rama larga en el hoyo y {f.el}
        {f.kind} pudo salir. «Gracias. Me llamo {f} y un día yo te ayudaré a ti», dijo {f.el}
        {f.kind}. «¡Pero si eres [tan|muy] pequeñ{f.o}!», dijo {h}. [Unos días|Una semana] después,
        {h} cayó en una red y no podía salir. {f} {h.lo} oyó [llorar|gritar], llegó corriendo y
        mordió las cuerdas hasta que se rompieron. «[Ya lo ves|Ahora ya lo sabes]: l{f.o}s
        pequeñ{f.o}s también hacemos cosas grandes», dijo {f}. [«Tenías razón», dijo {h}.|<end>]""",
    ),
    # Both want the same thing.
    (
        "",
        "",
        """<open> Su mejor amig{f.o} era {f}, {f.el} {f.kind}. <when>, l{g.o}s dos encontraron
        {food.un} {food} muy [grande|hermos{food.o}] {outside}. «¡Yo {food.lo} vi primero!», gritó
        {h}. «¡No, es mí{food.o}!», gritó {f}. Tiraron y empujaron hasta que cayeron al barro.
        {m.Un} {m.kind} muy viej{m.o} l{g.o}s miraba. «[Más vale medi{food.o} {food} con amigos que
        {food.un} {food} enter{food.o} sin ellos|Todo sabe mejor con amigos]», dijo. [«Perdón», dijo
        {h}. «Perdón», dijo también {f}.|{h} y {f} se miraron y [se echaron a reír|sintieron
        vergüenza].] {h} partió {food.el} {food} en dos y le dio a {f} el trozo más grande. Nunca
        habían comido {food.un} {food} tan buen{food.o}. [<moral>|Y l{g.o}s dos fueron muy
        felices.|]""",
    ),
    # A cold house in winter.
    (
        "",
        "",
        """<open> Era invierno y la nieve cubría [los campos|los tejados|las colinas]. {h} ya no
        tenía leña para el fuego y la casa estaba cada vez más fría. [Salió a buscar leña, pero
        había demasiada nieve.|] {f}, {f.el} {f.kind}, miró por la ventana. «¡Qué raro! No sale humo
        de la casa de {h}», pensó. Tomó un poco de leña y una olla de sopa, y caminó por la nieve.
        «¿Quién es?», preguntó {h}. «Soy yo, {f}. Traigo leña y sopa caliente», dijo {f}. Pronto
        ardió un buen fuego. L{g.o}s dos amig{g.o}s comieron y contaron historias [hasta muy
        tarde|toda la noche]. [Fuera caía la nieve, pero [dentro hacía calor|la casa estaba
        caliente].|{h} nunca olvidó la bondad de {f}.]""",
    ),
    # The way home is lost.
    (
        "!fly",
        "fly",
        """<open> <when>, {h} siguió a una mariposa {color.f} hasta el bosque. [Corrió tanto que no
        miró el camino.|] Cuando la mariposa se fue, {h} miró a su alrededor: todos los árboles
        parecían iguales. «Me he perdido», dijo. [Caía la noche|El sol se ponía] y {h} tenía miedo.
        Entonces oyó unas alas sobre su cabeza. Era {f}, {f.el} {f.kind}. «<calm>. Desde el cielo
        puedo ver tu casa. [Sígueme|Ven conmigo]», dijo {f}. {h} siguió a {f} [por la colina|por la
        orilla del río] hasta que vieron una luz. Su [madre|padre|{family}] esperaba en la puerta.
        «¡[Gracias|Muchas gracias], {f}!», dijo {h}. [<end>|]""",
    ),
    # The moon in the pond.
    (
        "",
        "",
        """<open> Una noche [clara|fresca|tranquila], {h} salió a pasear [junto al|cerca del]
        estanque. En el agua vio la luna, redonda y blanca. «¡Ay! La luna ha caído al agua y tengo
        que salvarla», dijo. {h} corrió a casa y volvió con [una red|un cubo|una cuerda]. Pero la
        luna [se rompía en pedazos|siempre se escapaba]. <meet> «¿Qué haces?», preguntó {f}. «Quiero
        salvar la luna», dijo {h}. {f} [sonrió|se rio en voz baja]. «Mira arriba», dijo. {h} levantó
        la cabeza y allí estaba la luna, en lo más alto del cielo. L{g.o}s dos amig{g.o}s se
        sentaron en la hierba y miraron las estrellas [hasta muy tarde|durante mucho tiempo].
        [<moral>|]""",
    ),
)
